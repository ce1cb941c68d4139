#pragma once

#include <array>
#include <bit>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

namespace lockstep {

/// The element types that every engine transfers and reduces.
enum class DType : std::uint8_t {
  u8,
  i8,
  i32,
  i64,
  f16,
  bf16,
  f32,
  f64,
  boolean,  ///< bool: one byte, 0 or 1
  i16,
  u16,
  u32,
  u64,
};

namespace detail {
/// Of a sample: its count, mean, sum of squared deviations, and 0, each an f64. They have only a
/// sum, which merges two samples. Only the library's own engines transfer them.
inline constexpr DType kMoments = static_cast<DType>(static_cast<int>(DType::u64) + 1);
}  // namespace detail

/// Size of one element in bytes; 0 if the value is not a DType.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::u8:
    case DType::i8:
    case DType::boolean: return 1;
    case DType::i16:
    case DType::u16:
    case DType::f16:
    case DType::bf16: return 2;
    case DType::i32:
    case DType::u32:
    case DType::f32: return 4;
    case DType::i64:
    case DType::u64:
    case DType::f64: return 8;
  }
  return dtype == detail::kMoments ? 32 : 0;
}

/// Whether it is f16, bf16, f32 or f64.
constexpr bool is_floating(DType dtype) { return dtype >= DType::f16 && dtype <= DType::f64; }

/// "f32", "bool", ... as in errors.
std::string_view name_of(DType dtype);

/// How the ranks' values are combined. Sums and products of integers wrap; `mean` of integers
/// divides the exact sum and truncates toward zero; `mean` of f32 and f64 divides the sum, and is
/// infinite where the sum is. 16-bit floats accumulate in f32 and are rounded once; `min` and `max`
/// propagate NaN. The bitwise operations take integers and bool; bool has no sum, product or mean.
/// Every reduction is in the order of one tree over the ranks, ((0 + 1) + (2 + 3)) + ..., where an
/// odd one out is passed up unchanged, whatever the size and the engine: the results are bitwise
/// identical on all ranks, but for the sign and the payload of a NaN that a sum, product or mean
/// gives, which differ between CPUs. Over several hosts first the ranks of each host, then the
/// hosts: the same tree if each host has 2^k consecutive ranks, and the last at most as many.
enum class ReduceOp : std::uint8_t { sum, product, min, max, band, bor, bxor, mean };

/// A row of kReduceOps.
struct ReduceOpTraits {
  ReduceOp op;
  std::string_view name;       ///< as in errors and of parse_reduce_op
  bool is_arithmetic = false;  ///< of numbers: not of bool
  bool is_bitwise = false;     ///< of bits: not of floats
};

/// Every reduction, in the order of their values.
inline constexpr std::array kReduceOps = {
    ReduceOpTraits{.op = ReduceOp::sum, .name = "sum", .is_arithmetic = true},
    ReduceOpTraits{.op = ReduceOp::product, .name = "product", .is_arithmetic = true},
    ReduceOpTraits{.op = ReduceOp::min, .name = "min"},
    ReduceOpTraits{.op = ReduceOp::max, .name = "max"},
    ReduceOpTraits{.op = ReduceOp::band, .name = "band", .is_bitwise = true},
    ReduceOpTraits{.op = ReduceOp::bor, .name = "bor", .is_bitwise = true},
    ReduceOpTraits{.op = ReduceOp::bxor, .name = "bxor", .is_bitwise = true},
    ReduceOpTraits{.op = ReduceOp::mean, .name = "mean", .is_arithmetic = true},
};

static_assert([] {
  for (std::size_t i = 0; i < kReduceOps.size(); ++i) {
    if (static_cast<std::size_t>(kReduceOps[i].op) != i) return false;
  }
  return true;
}());

namespace detail {
/// Whether the row of `op` has kIs: comparisons with constants, not a lookup in the table.
template <bool ReduceOpTraits::*kIs>
constexpr bool is(ReduceOp op) {
  return [op]<std::size_t... i>(std::index_sequence<i...>) {
    return ((std::bool_constant<kReduceOps[i].*kIs>::value && op == static_cast<ReduceOp>(i)) ||
            ...);
  }
  (std::make_index_sequence<kReduceOps.size()>());
}
}  // namespace detail

/// Whether the reduction is defined for elements of the type. false if it is no ReduceOp.
constexpr bool can_reduce(ReduceOp op, DType dtype) {
  if (static_cast<std::size_t>(op) >= kReduceOps.size()) return false;
  if (dtype == detail::kMoments) return op == ReduceOp::sum;
  if (dtype == DType::boolean) return !detail::is<&ReduceOpTraits::is_arithmetic>(op);
  return !detail::is<&ReduceOpTraits::is_bitwise>(op) || !is_floating(dtype);
}

/// "sum", ... as in errors.
std::string_view name_of(ReduceOp op);

/// Parses "sum", "SUM", "Mean", ... Throws UsageError with the valid names for anything else.
ReduceOp parse_reduce_op(std::string_view name);

/// IEEE 754 binary16, storage only: convert to float for arithmetic.
struct Float16 {
  std::uint16_t bits = 0;

  constexpr Float16() = default;
  constexpr explicit Float16(float value);
  constexpr explicit operator float() const;
  friend constexpr bool operator==(Float16, Float16) = default;  // compares bits
};

/// bfloat16, the upper half of a binary32, storage only: convert to float for arithmetic.
struct BFloat16 {
  std::uint16_t bits = 0;

  constexpr BFloat16() = default;
  constexpr explicit BFloat16(float value);
  constexpr explicit operator float() const;
  friend constexpr bool operator==(BFloat16, BFloat16) = default;  // compares bits
};

namespace detail {

template <class T>
consteval std::optional<DType> dtype_of() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::same_as<U, Float16>) return DType::f16;
  if constexpr (std::same_as<U, BFloat16>) return DType::bf16;
  if constexpr (std::same_as<U, float>) return DType::f32;
  if constexpr (std::same_as<U, double>) return DType::f64;
  if constexpr (std::same_as<U, bool>) return DType::boolean;
  if constexpr (std::integral<U> && !std::same_as<U, bool>) {
    constexpr bool kIsSigned = std::is_signed_v<U>;
    if constexpr (sizeof(U) == 1) return kIsSigned ? DType::i8 : DType::u8;
    if constexpr (sizeof(U) == 2) return kIsSigned ? DType::i16 : DType::u16;
    if constexpr (sizeof(U) == 4) return kIsSigned ? DType::i32 : DType::u32;
    if constexpr (sizeof(U) == 8) return kIsSigned ? DType::i64 : DType::u64;
  }
  return std::nullopt;
}

}  // namespace detail

/// C++ types with a DType: bool, integers of 8 to 64 bits, Float16, BFloat16, float, double.
template <class T>
concept Arithmetic = detail::dtype_of<T>()
.has_value();

/// The DType of T.
template <Arithmetic T>
inline constexpr DType kDTypeOf = *detail::dtype_of<T>();

/// Type-erased views of elements, for the operations of Group. data may be null if count is 0.
struct ConstElements {
  const void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::u8;

  std::size_t n_bytes() const { return count * size_of(dtype); }
};

/// The same for elements that are written.
struct Elements {
  void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::u8;

  std::size_t n_bytes() const { return count * size_of(dtype); }
  operator ConstElements() const { return {data, count, dtype}; }
};

/// The time limit of one call: any std::chrono duration. Default-constructed: the group's timeout.
class Timeout {
 public:
  constexpr Timeout() = default;
  /// At most `limit` from the start of the call, rounded up to milliseconds. Zero or less: the call
  /// does not wait. A hundred years or more: never().
  template <class Rep, class Period>
  constexpr Timeout(std::chrono::duration<Rep, Period> limit)  // NOLINT: implicit from durations
      : limit_(in_milliseconds(limit)) {}
  /// A hundred years.
  static constexpr Timeout never() { return Timeout(kNever); }

  constexpr bool is_given() const { return limit_ != kNone; }
  constexpr std::chrono::milliseconds or_else(std::chrono::milliseconds fallback) const {
    return is_given() ? limit_ : fallback;
  }

 private:
  static constexpr std::chrono::milliseconds kNone = std::chrono::milliseconds::min();
  static constexpr std::chrono::milliseconds kNever = std::chrono::hours(876'000);

  template <class Rep, class Period>
  static constexpr std::chrono::milliseconds in_milliseconds(
      std::chrono::duration<Rep, Period> limit) {
    // Compared as double first, which represents any duration without overflow.
    const auto rough = std::chrono::duration<double, std::milli>(limit).count();
    if (rough != rough || rough >= static_cast<double>(kNever.count())) return kNever;
    return rough <= 0 ? std::chrono::milliseconds::zero()
                      : std::chrono::ceil<std::chrono::milliseconds>(limit);
  }

  std::chrono::milliseconds limit_ = kNone;  // one word, because every call passes one
};

// --- conversions ----------------------------------------------------------------------------

constexpr BFloat16::BFloat16(float value) {
  const auto word = std::bit_cast<std::uint32_t>(value);
  if ((word & 0x7fffffffU) > 0x7f800000U) {
    bits = static_cast<std::uint16_t>((word >> 16) | 0x40U);  // keep a NaN a (quiet) NaN
  } else {
    bits = static_cast<std::uint16_t>((word + 0x7fffU + ((word >> 16) & 1U)) >> 16);
  }
}

constexpr BFloat16::operator float() const {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

constexpr Float16::Float16(float value) {
  const auto word = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((word >> 16) & 0x8000U);
  const std::uint32_t magnitude = word & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    bits = static_cast<std::uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x1ffU));
  } else if (magnitude >= 0x477ff000U) {  // rounds to 2^16 or more: infinity
    bits = static_cast<std::uint16_t>(sign | 0x7c00U);
  } else if (magnitude >= 0x38800000U) {  // normal: rebias, round to nearest even
    const std::uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
    bits = static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
  } else if (magnitude < 0x33000000U) {  // below half of the smallest subnormal
    bits = sign;
  } else {  // subnormal: the exponent gives the right shift of the significand
    const std::uint32_t shift = 126U - (magnitude >> 23);
    const std::uint32_t significand = (magnitude & 0x7fffffU) | 0x800000U;
    const std::uint32_t kept = significand >> shift;
    const std::uint32_t rest = significand & ((1U << shift) - 1U);
    const std::uint32_t half = 1U << (shift - 1U);
    const std::uint32_t up = (rest > half || (rest == half && (kept & 1U) != 0U)) ? 1U : 0U;
    bits = static_cast<std::uint16_t>(sign | (kept + up));
  }
}

constexpr Float16::operator float() const {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fU;
  const std::uint32_t significand = bits & 0x3ffU;
  if (exponent == 0x1fU) return std::bit_cast<float>(sign | 0x7f800000U | (significand << 13));
  if (exponent != 0U) {
    return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (significand << 13));
  }
  const float magnitude = static_cast<float>(significand) * 0x1p-24F;
  return sign != 0U ? -magnitude : magnitude;
}

}  // namespace lockstep
