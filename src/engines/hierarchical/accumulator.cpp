#include "engines/hierarchical/accumulator.hpp"

#include <cstdint>
#include <cstring>

namespace lockstep::hierarchical {
namespace {

/// Calls visit(Narrow, Wide), but not of detail::kMoments: they are only summed, in their own type.
template <class Visit>
void visit(DType dtype, ReduceOp op, Visit visit) {
  const auto integer = [&]<class T>(T narrow) {
    return op == ReduceOp::mean ? visit(narrow, std::int64_t{}) : visit(narrow, narrow);
  };
  switch (dtype) {
    case DType::boolean: return visit(bool{}, bool{});
    case DType::u8: return integer(std::uint8_t{});
    case DType::i8: return integer(std::int8_t{});
    case DType::u16: return integer(std::uint16_t{});
    case DType::i16: return integer(std::int16_t{});
    case DType::u32: return integer(std::uint32_t{});
    case DType::i32: return integer(std::int32_t{});
    case DType::u64: return visit(std::uint64_t{}, std::uint64_t{});
    case DType::i64: return visit(std::int64_t{}, std::int64_t{});
    case DType::f16: return visit(Float16{}, float{});
    case DType::bf16: return visit(BFloat16{}, float{});
    case DType::f32: return visit(float{}, float{});
    case DType::f64: return visit(double{}, double{});
  }
}

__extension__ typedef __int128 Int128;

bool is_halved(DType dtype, ReduceOp op) {
  return op == ReduceOp::mean && (dtype == DType::i64 || dtype == DType::u64);
}

/// A 64-bit integer as upper * 2^32 + lower. Sums of each half over 2^31 ranks fit i64.
struct Halves {
  std::int64_t upper;
  std::int64_t lower;
};

template <class T>
Halves halves_of(T value) {
  return {static_cast<std::int64_t>(value >> 32),
          static_cast<std::int64_t>(static_cast<std::uint64_t>(value) & 0xffffffffU)};
}

template <class T>
T mean_of(const Halves& sum, int n) {
  return static_cast<T>((static_cast<Int128>(sum.upper) * (Int128{1} << 32) + sum.lower) / n);
}

/// to[i] = change(from[i]), for any alignment.
template <class From, class To, class Change>
void transform(const void* from, void* to, std::size_t count, Change change) {
  const auto* source = static_cast<const std::byte*>(from);
  auto* target = static_cast<std::byte*>(to);
  for (std::size_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, source + i * sizeof(From), sizeof(From));
    const To changed = change(value);
    std::memcpy(target + i * sizeof(To), &changed, sizeof(To));
  }
}

}  // namespace

Accumulator accumulator_of(DType dtype, ReduceOp op) {
  if (dtype == DType::f16 || dtype == DType::bf16) return {.dtype = DType::f32, .n_parts = 1};
  if (op != ReduceOp::mean || is_floating(dtype)) return {.dtype = dtype, .n_parts = 1};
  return {.dtype = DType::i64, .n_parts = is_halved(dtype, op) ? 2U : 1U};
}

void to_accumulator(DType dtype, ReduceOp op, const void* from, void* to, std::size_t count) {
  if (dtype == DType::i64 && is_halved(dtype, op)) {
    return transform<std::int64_t, Halves>(from, to, count, halves_of<std::int64_t>);
  }
  if (dtype == DType::u64 && is_halved(dtype, op)) {
    return transform<std::uint64_t, Halves>(from, to, count, halves_of<std::uint64_t>);
  }
  if (accumulator_of(dtype, op).dtype == dtype) {
    if (from != to && count != 0) std::memcpy(to, from, count * size_of(dtype));
    return;
  }
  visit(dtype, op, [&]<class Narrow, class Wide>(Narrow, Wide) {
    transform<Narrow, Wide>(from, to, count, [](Narrow value) { return static_cast<Wide>(value); });
  });
}

void from_accumulator(DType dtype, ReduceOp op, const void* from, int n, void* to,
                      std::size_t count) {
  // Works in place: no element written is longer than the one read before it.
  if (is_halved(dtype, op)) {
    if (dtype == DType::i64) {
      transform<Halves, std::int64_t>(
          from, to, count, [n](const Halves& sum) { return mean_of<std::int64_t>(sum, n); });
    } else {
      transform<Halves, std::uint64_t>(
          from, to, count, [n](const Halves& sum) { return mean_of<std::uint64_t>(sum, n); });
    }
    return;
  }
  if (op != ReduceOp::mean && accumulator_of(dtype, op).dtype == dtype) {
    if (from != to && count != 0) std::memcpy(to, from, count * size_of(dtype));
    return;
  }
  visit(dtype, op, [&]<class Narrow, class Wide>(Narrow, Wide) {
    if (op == ReduceOp::mean) {
      transform<Wide, Narrow>(from, to, count, [divisor = static_cast<Wide>(n)](Wide value) {
        return static_cast<Narrow>(value / divisor);
      });
    } else {
      transform<Wide, Narrow>(from, to, count,
                              [](Wide value) { return static_cast<Narrow>(value); });
    }
  });
}

}  // namespace lockstep::hierarchical
