#pragma once

#include <cstdint>
#include <lockstep/engine.hpp>

namespace lockstep::internal {

/// The signature of a call in one word: op, dtype, reduction in a byte each, and the root plus one.
/// Byte 3 is free for the caller's flags.
inline std::uint64_t encode_call(const Call& call) noexcept {
  return static_cast<std::uint64_t>(call.op) | static_cast<std::uint64_t>(call.dtype) << 8U |
         static_cast<std::uint64_t>(call.reduce) << 16U |
         static_cast<std::uint64_t>(static_cast<std::uint32_t>(call.root + 1)) << 32U;
}
inline Op op_of(std::uint64_t signature) noexcept { return static_cast<Op>(signature & 0xffU); }
inline DType dtype_of(std::uint64_t signature) noexcept {
  return static_cast<DType>(signature >> 8U & 0xffU);
}
inline ReduceOp reduce_of(std::uint64_t signature) noexcept {
  return static_cast<ReduceOp>(signature >> 16U & 0xffU);
}
inline int root_of(std::uint64_t signature) noexcept {
  return static_cast<int>(signature >> 32U) - 1;
}

/// Whether the operation is between two ranks, and not of all.
inline bool is_pair(Op op) noexcept { return op == Op::send || op == Op::recv; }
inline bool is_reduction(Op op) noexcept {
  return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter;
}
/// Whether the operation uses this field of a call.
bool has_root(Op op) noexcept;
bool has_reduction(Op op) noexcept;
inline bool moves_data(Op op) noexcept { return op != Op::barrier && op != Op::split; }

/// The size of this rank's buffer.
inline std::size_t n_bytes_of(const Call& call) noexcept {
  return moves_data(call.op) ? call.count * size_of(call.dtype) : 0;
}

}  // namespace lockstep::internal
