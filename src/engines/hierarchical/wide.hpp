#pragma once

#include <cstddef>
#include <lockstep/types.hpp>

namespace lockstep::hierarchical {

/// The type in which partial results of a reduction travel, so that they are rounded once: f32 for
/// the 16-bit floats, i64 for means of integers, else the type itself.
DType wide_type(DType dtype, ReduceOp op);

/// to[count] of wide_type(dtype, op) <- from[count] of dtype. `to` may be `from` where the types
/// are the same.
void widen(DType dtype, ReduceOp op, const void* from, void* to, std::size_t count);

/// to[count] of dtype <- from[count] of wide_type(dtype, op), a mean divided by n. `to` may be
/// `from`.
void finish(DType dtype, ReduceOp op, const void* from, int n, void* to, std::size_t count);

}  // namespace lockstep::hierarchical
