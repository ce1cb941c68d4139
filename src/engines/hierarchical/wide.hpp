#pragma once

#include <cstddef>
#include <lockstep/types.hpp>

namespace lockstep::hierarchical {

/// The type in which partial results of a reduction are sent, to be rounded once and not to wrap:
/// 16-bit floats as f32; means of integers as i64, 64-bit integers in two halves of 32 bits each.
struct Wide {
  DType dtype;
  std::size_t n_parts;  ///< per element

  std::size_t n_bytes(std::size_t count) const { return count * n_parts * size_of(dtype); }
};
Wide wide_type(DType dtype, ReduceOp op);

/// to[count] of wide_type(dtype, op) <- from[count] of dtype. `to` may be `from` if the types are
/// the same.
void widen(DType dtype, ReduceOp op, const void* from, void* to, std::size_t count);

/// to[count] of dtype <- from[count] of wide_type(dtype, op), a mean divided by n. `to` may be
/// `from`.
void finish(DType dtype, ReduceOp op, const void* from, int n, void* to, std::size_t count);

}  // namespace lockstep::hierarchical
