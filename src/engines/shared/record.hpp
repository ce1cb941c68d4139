#pragma once

#include <cstdint>
#include <lockstep/engine.hpp>

namespace lockstep::shared {

/// The parts of a CallRecord's `what`: op, dtype, reduction in a byte each, a bit that says whether
/// the call has returned, and the root plus one.
inline constexpr std::uint64_t kFinished = 1ULL << 24U;

inline std::uint64_t pack_what(const Call& call) noexcept {
  return static_cast<std::uint64_t>(call.op) | static_cast<std::uint64_t>(call.dtype) << 8U |
         static_cast<std::uint64_t>(call.reduce) << 16U |
         static_cast<std::uint64_t>(call.root + 1) << 32U;
}
inline Op op_of(std::uint64_t what) noexcept { return static_cast<Op>(what & 0xffU); }
inline DType dtype_of(std::uint64_t what) noexcept {
  return static_cast<DType>(what >> 8U & 0xffU);
}
inline ReduceOp reduce_of(std::uint64_t what) noexcept {
  return static_cast<ReduceOp>(what >> 16U & 0xffU);
}
inline int root_of(std::uint64_t what) noexcept { return static_cast<int>(what >> 32U) - 1; }

}  // namespace lockstep::shared
