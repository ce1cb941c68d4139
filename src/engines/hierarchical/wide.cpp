#include "engines/hierarchical/wide.hpp"

#include <cstdint>
#include <cstring>

namespace lockstep::hierarchical {
namespace {

/// Calls visit(Narrow, Wide).
template <class Visit>
void visit(DType dtype, ReduceOp op, Visit visit) {
  const bool is_mean = op == ReduceOp::mean;
  switch (dtype) {
    case DType::u8:
      return is_mean ? visit(std::uint8_t{}, std::int64_t{})
                     : visit(std::uint8_t{}, std::uint8_t{});
    case DType::i8:
      return is_mean ? visit(std::int8_t{}, std::int64_t{}) : visit(std::int8_t{}, std::int8_t{});
    case DType::i32:
      return is_mean ? visit(std::int32_t{}, std::int64_t{})
                     : visit(std::int32_t{}, std::int32_t{});
    case DType::i64: return visit(std::int64_t{}, std::int64_t{});
    case DType::f16: return visit(Float16{}, float{});
    case DType::bf16: return visit(BFloat16{}, float{});
    case DType::f32: return visit(float{}, float{});
    case DType::f64: return visit(double{}, double{});
  }
}

/// to[i] = change(from[i]), wherever the bytes lie.
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

DType wide_type(DType dtype, ReduceOp op) {
  if (dtype == DType::f16 || dtype == DType::bf16) return DType::f32;
  return op == ReduceOp::mean && !is_floating(dtype) ? DType::i64 : dtype;
}

void widen(DType dtype, ReduceOp op, const void* from, void* to, std::size_t count) {
  if (wide_type(dtype, op) == dtype) {
    if (from != to && count != 0) std::memcpy(to, from, count * size_of(dtype));
    return;
  }
  visit(dtype, op, [&]<class Narrow, class Wide>(Narrow, Wide) {
    transform<Narrow, Wide>(from, to, count, [](Narrow value) { return static_cast<Wide>(value); });
  });
}

void finish(DType dtype, ReduceOp op, const void* from, int n, void* to, std::size_t count) {
  if (op != ReduceOp::mean && wide_type(dtype, op) == dtype) {
    if (from != to && count != 0) std::memcpy(to, from, count * size_of(dtype));
    return;
  }
  visit(dtype, op, [&]<class Narrow, class Wide>(Narrow, Wide) {
    // In place too: what is written is never longer than what was read before it.
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
