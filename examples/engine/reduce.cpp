#include "reduce.hpp"

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace example {
namespace {

using lockstep::DType;
using lockstep::ReduceOp;

__extension__ typedef __int128 Int128;
__extension__ typedef unsigned __int128 UInt128;

/// Holds any sum of T exactly if T is an integer; 16-bit floats are summed as float.
template <class T>
using Wide = std::conditional_t<std::is_integral_v<T>, Int128,
                                std::conditional_t<std::is_same_v<T, double>, double, float>>;

template <class T>
Wide<T> combine(ReduceOp op, Wide<T> a, Wide<T> b) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::mean: return a + b;
    case ReduceOp::min: return a <= b || a != a ? a : b;  // a NaN stays
    case ReduceOp::max: return a >= b || a != a ? a : b;
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::band) return a & b;
    if (op == ReduceOp::bor) return a | b;
    if (op == ReduceOp::bxor) return a ^ b;
    return static_cast<T>(static_cast<UInt128>(a) * static_cast<UInt128>(b));  // wraps
  } else {
    return a * b;
  }
}

template <class T>
void reduce_as(ReduceOp op, const std::vector<const std::byte*>& in, std::byte* out,
               std::size_t count) {
  std::vector<Wide<T>> values(in.size());
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t r = 0; r < in.size(); ++r) {
      T value;
      std::memcpy(&value, in[r] + i * sizeof(T), sizeof(T));
      values[r] = static_cast<Wide<T>>(value);
    }
    for (std::size_t n = in.size(); n > 1; n = (n + 1) / 2) {
      for (std::size_t r = 0; r < n; r += 2) {
        values[r / 2] = r + 1 < n ? combine<T>(op, values[r], values[r + 1]) : values[r];
      }
    }
    if (op == ReduceOp::mean) values[0] = values[0] / static_cast<Wide<T>>(in.size());
    const T value = static_cast<T>(values[0]);
    std::memcpy(out + i * sizeof(T), &value, sizeof(T));
  }
}

}  // namespace

void reduce(DType dtype, ReduceOp op, const std::vector<const std::byte*>& in, std::byte* out,
            std::size_t count) {
  switch (dtype) {
    case DType::boolean: return reduce_as<bool>(op, in, out, count);
    case DType::u8: return reduce_as<std::uint8_t>(op, in, out, count);
    case DType::i8: return reduce_as<std::int8_t>(op, in, out, count);
    case DType::u16: return reduce_as<std::uint16_t>(op, in, out, count);
    case DType::i16: return reduce_as<std::int16_t>(op, in, out, count);
    case DType::u32: return reduce_as<std::uint32_t>(op, in, out, count);
    case DType::i32: return reduce_as<std::int32_t>(op, in, out, count);
    case DType::u64: return reduce_as<std::uint64_t>(op, in, out, count);
    case DType::i64: return reduce_as<std::int64_t>(op, in, out, count);
    case DType::f16: return reduce_as<lockstep::Float16>(op, in, out, count);
    case DType::bf16: return reduce_as<lockstep::BFloat16>(op, in, out, count);
    case DType::f32: return reduce_as<float>(op, in, out, count);
    case DType::f64: return reduce_as<double>(op, in, out, count);
  }
}

}  // namespace example
