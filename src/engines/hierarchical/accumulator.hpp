#pragma once

#include <cstddef>
#include <lockstep/types.hpp>

namespace lockstep::hierarchical {

/// The type in which partial results of a reduction are sent, to be rounded once and not to wrap:
/// 16-bit floats as f32; means of integers as i64, 64-bit integers in two halves of 32 bits each.
struct Accumulator {
  DType dtype;
  std::size_t n_parts;  ///< per element

  std::size_t n_bytes(std::size_t count) const { return count * n_parts * size_of(dtype); }
};
Accumulator accumulator_of(DType dtype, ReduceOp op);

/// to[count] of accumulator_of(dtype, op) <- from[count] of dtype. `to` may be `from` if the types
/// are the same.
void to_accumulator(DType dtype, ReduceOp op, const void* from, void* to, std::size_t count);

/// to[count] of dtype <- from[count] of accumulator_of(dtype, op), a mean divided by n. `to` may be
/// `from`.
void from_accumulator(DType dtype, ReduceOp op, const void* from, int n, void* to,
                      std::size_t count);

}  // namespace lockstep::hierarchical
