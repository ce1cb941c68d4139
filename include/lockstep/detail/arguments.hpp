#pragma once

#include <chrono>
#include <concepts>
#include <ranges>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/types.hpp>

/// Types to bytes, and the argument checks of group.hpp, dist.hpp and objects.hpp, with one message
/// for each likely mistake.
/// The functions accept any type and check it here: a concept on the function would only give "no
/// matching function" and list every overload.
namespace lockstep {

struct CallOptions;

/// A contiguous range of numbers: a vector, array, span, ...
template <class R>
concept ArithmeticRange = std::ranges::contiguous_range<R> && std::ranges::sized_range<R> &&
    Arithmetic<std::ranges::range_value_t<R>>;

namespace detail {

template <class>
inline constexpr bool kNever = false;

/// Matches at::Tensor, which the core does not include.
template <class T>
concept TensorLike = requires(const T& t) {
  t.scalar_type();
  t.sizes();
  t.is_contiguous();
};

/// True for types that have overloads of the same names in another header, by const reference:
/// <lockstep/nn.hpp> for tensors. Excludes R&& here, which would be the better match.
template <class R>
inline constexpr bool kHasOwnOperations = false;
template <class R>
requires(!std::same_as<R, std::remove_cvref_t<R>>) inline constexpr bool kHasOwnOperations<R> =
    kHasOwnOperations<std::remove_cvref_t<R>>;

/// Two ranges for one function. <lockstep/nn.hpp> has functions of the same names for tensors, and
/// a call with a Group argument finds both by argument-dependent lookup.
template <class In, class Out>
concept TwoRanges = std::ranges::range<In> && std::ranges::range<Out> &&
    (ArithmeticRange<std::remove_cvref_t<In>> || ArithmeticRange<std::remove_cvref_t<Out>>);

template <class R>
using ElementOf = std::remove_reference_t<std::ranges::range_reference_t<R>>;

enum class Use {
  read,
  write,
  read_later,  ///< by an asynchronous call: must outlive it
  write_later,
};

/// Compiles if `R&&` is data for that use; otherwise fails with a message that says what is wrong.
template <class R, Use kUse>
consteval void check_data() {
  using D = std::remove_cvref_t<R>;
  constexpr bool kWrites = kUse == Use::write || kUse == Use::write_later;
  constexpr bool kIsTemporary = !std::is_lvalue_reference_v<R>;
  if constexpr (TensorLike<D>) {
    static_assert(kNever<R>,
                  "lockstep: tensors are not supported here: include <lockstep/nn.hpp> and call "
                  "the function of the same name in lockstep::nn with a named tensor");
  } else if constexpr (std::is_pointer_v<D>) {
    static_assert(kNever<R>, "lockstep: a pointer has no length: pass std::span(pointer, count)");
  } else if constexpr (std::is_arithmetic_v<D>) {
    static_assert(kNever<R>,
                  "lockstep: a single number is not a range: pass std::span(&value, 1) or a "
                  "std::array; to reduce it, use value = all_reduce_value(value)");
  } else if constexpr (std::same_as<D, std::vector<bool>>) {
    static_assert(kNever<R>,
                  "lockstep: std::vector<bool> packs its elements into bits: use std::array<bool, "
                  "N>, or a std::vector of std::uint8_t");
  } else if constexpr (!std::ranges::contiguous_range<D>) {
    static_assert(kNever<R>,
                  "lockstep: pass contiguous numbers (std::vector, std::array, std::span); for one "
                  "object of any type use all_gather_object or broadcast_object");
  } else if constexpr (!ArithmeticRange<D>) {
    static_assert(kNever<R>,
                  "lockstep: elements are bool, integers of 8 to 64 bits, Float16, BFloat16, float "
                  "or double; tensors are for the functions of <lockstep/nn.hpp>, other types for "
                  "all_gather_object, broadcast_object and collect_results");
  } else if constexpr (kWrites && (std::is_const_v<ElementOf<R>> ||
                                   (kIsTemporary && !std::ranges::borrowed_range<D>))) {
    static_assert(kNever<R>,
                  "lockstep: the result is written here: pass a named object that is not const");
  } else if constexpr (kUse == Use::read_later && kIsTemporary && !std::ranges::borrowed_range<D>) {
    static_assert(kNever<R>,
                  "lockstep: an asynchronous call reads the data until Work::wait returns, but the "
                  "temporary is destroyed earlier: pass a named object");
  }
}

/// Data that is not type-erased yet: for the typed members of Group.
template <class R>
concept TypedData = !std::convertible_to<R, Elements> && !std::convertible_to<R, ConstElements>;

/// A type given in place of a ReduceOp.
template <class T>
concept NoReduceOp =
    !std::same_as<std::remove_cvref_t<T>, CallOptions> && !std::convertible_to<T, ReduceOp>;

/// Arguments by name of any types. As the default of a template parameter it takes those of which
/// one does not fit CallOptions: if all fit, the overload with CallOptions is the more specialised.
struct AnyOptions {
  struct Any {
    Any() = default;
    template <class T>
    Any(T&&) {}  // NOLINT: implicit from all
  };
  Any op{}, group{}, timeout{};
};

template <class First, NoReduceOp Given>
consteval void explain_op() {
  static_assert(
      kNever<Given>,
      "lockstep: the arguments are (data, op, group, timeout), or by name (data, {.op, .group, "
      ".timeout}); a member of Group takes (data, op, timeout), and reduce dst after data. data is "
      "one range, such as std::span(pointer, size), which is reduced in place; op is a ReduceOp, "
      "such as ReduceOp::sum or parse_reduce_op(text); timeout is a duration, such as 5s");
}

template <Arithmetic T>
Elements erase(std::span<T> data) {
  return {data.data(), data.size(), kDTypeOf<T>};
}
template <Arithmetic T>
ConstElements erase(std::span<const T> data) {
  return {data.data(), data.size(), kDTypeOf<T>};
}

/// Checks and erases the data of a call. Always inlined: if an address is returned in a struct in
/// memory, gcc 12 assumes that it does not escape and keeps the caller's variable in a register
/// across the collective (at -O1; -fno-ipa-modref also prevents it).
template <Use kUse = Use::write, class R>
[[gnu::always_inline]] inline Elements written(R&& range) {
  check_data<R, kUse>();
  if constexpr (ArithmeticRange<std::remove_cvref_t<R>>) {
    if constexpr (!std::is_const_v<ElementOf<R>>) return erase(std::span<ElementOf<R>>(range));
  }
  return {};
}
template <Use kUse = Use::read, class R>
[[gnu::always_inline]] inline ConstElements read(R&& range) {
  check_data<R, kUse>();
  if constexpr (ArithmeticRange<std::remove_cvref_t<R>>) {
    return erase(std::span<const std::remove_const_t<ElementOf<R>>>(range));
  } else {
    return {};
  }
}
template <class R>
[[gnu::always_inline]] inline Elements written_later(R&& range) {
  return written<Use::write_later>(std::forward<R>(range));
}
template <class R>
[[gnu::always_inline]] inline ConstElements read_later(R&& range) {
  return read<Use::read_later>(std::forward<R>(range));
}

/// The container for another rank's data of a range of this type; for any other type check_data
/// reports the error.
template <class R>
struct PartOf {
  using Type = std::vector<char>;
};
template <ArithmeticRange R>
struct PartOf<R> {
  using Type = std::vector<std::ranges::range_value_t<R>>;
};
template <>
struct PartOf<std::string> {
  using Type = std::string;
};
template <class R>
using Parts = std::vector<typename PartOf<R>::Type>;

}  // namespace detail
}  // namespace lockstep
