#pragma once

#include <cstddef>
#include <lockstep/types.hpp>
#include <vector>

namespace example {

/// out[i] <- in[0][i], in[1][i], ... combined as ReduceOp says: neighbours, then neighbours of
/// these, and so on, so that floats have the bits of lockstep's own engines. out may not overlap
/// in.
void reduce(lockstep::DType dtype, lockstep::ReduceOp op, const std::vector<const std::byte*>& in,
            std::byte* out, std::size_t count);

}  // namespace example
