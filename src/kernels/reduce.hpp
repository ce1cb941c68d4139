#pragma once

#include <cstddef>

#include <lockstep/types.hpp>

namespace lockstep::kernels {

/// out[i] = in[0][i] op in[1][i] op ... op in[n - 1][i]. Sums, products and means of floats, and
/// moments, in the order of the tree: ((in[0] op in[1]) op (in[2] op in[3])) op ..., where an odd
/// one out is passed up unchanged; so 2^k inputs that begin at a multiple of 2^k are a subtree, and
/// may be reduced before. f16 and bf16 accumulate in f32 and round once. mean divides at
/// the end; for integers it is the exact sum divided by n, truncated toward zero. Integer sums and
/// products wrap. min and max propagate NaN. Empty moments count as absent. `out` may be one of the
/// inputs and may not overlap them otherwise. No alignment is required. n in 1..2^21 (for n = 1 the
/// input is copied); op must fit dtype, see can_reduce. Bitwise equal on every instruction set,
/// except the sign and the payload of a NaN that a sum, product or mean gives. Threads: any number
/// at once.
void reduce(DType dtype, ReduceOp op, const void* const* in, int n, void* out, std::size_t count);

}  // namespace lockstep::kernels
