#pragma once

#include <chrono>
#include <concepts>
#include <ranges>
#include <span>
#include <type_traits>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/types.hpp>

/// Argument checks of dist.hpp and objects.hpp, with one message for each likely mistake.
/// The functions accept any type and check it here: a concept on the function would only give "no
/// matching function" and list every overload.
namespace lockstep {

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

/// A type given in place of a ReduceOp.
template <class T>
concept NoReduceOp = !std::convertible_to<T, ReduceOp>;

template <class First, NoReduceOp Second>
consteval void explain_second() {
  static_assert(
      kNever<Second>,
      "lockstep: the arguments are (data, op, group, timeout): data is one range, such as "
      "std::span(pointer, size), which is reduced in place, and op is a ReduceOp, such as "
      "ReduceOp::sum or parse_reduce_op(text)");
}

}  // namespace detail
}  // namespace lockstep
