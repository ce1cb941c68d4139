#pragma once

#include <cstddef>

#include <lockstep/types.hpp>

namespace lockstep::kernels {

/// out[i] = in[0][i] op in[1][i] op ... op in[n - 1][i], folded in that order.
/// f16 and bf16 accumulate in f32 and round once; mean divides at the end and, on integers, is that
/// of the exact sum, truncated toward zero; integer sums and products wrap; NaN wins in min and
/// max. `out` may be one of the inputs, and may not overlap them otherwise; nothing needs
/// alignment. n in 1..2^21 (with n = 1 the input is copied); op fits dtype: see can_reduce. Same
/// bits on every instruction set, but for the payload of a NaN that a sum or product makes.
/// Threads: any number at once.
void reduce(DType dtype, ReduceOp op, const void* const* in, int n, void* out, std::size_t count);

/// Whether `op` is defined for `dtype`: bit operations are for integers and bool; sum, product and
/// mean are not for bool.
bool can_reduce(DType dtype, ReduceOp op);

}  // namespace lockstep::kernels
