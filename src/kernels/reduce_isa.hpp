#pragma once

#include <cstddef>

#include <lockstep/types.hpp>

#include "kernels/isa.hpp"

namespace lockstep::kernels {

using ReduceFunction = void (*)(const void* const* in, int n, void* out, std::size_t count);

inline constexpr int kDTypes = 14;

/// One function per (dtype, op); null if not can_reduce(op, dtype).
struct ReduceTable {
  ReduceFunction function[kDTypes][kReduceOps.size()];
};

// One per instruction set that this build has; each for n >= 2.
namespace scalar {
extern const ReduceTable kReduceTable;
}
namespace avx2 {
extern const ReduceTable kReduceTable;
}
namespace avx512 {
extern const ReduceTable kReduceTable;
}

/// `isa` must be supported.
const ReduceTable& reduce_table(Isa isa);

}  // namespace lockstep::kernels
