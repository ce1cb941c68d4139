#pragma once

#include <cstddef>

namespace lockstep::test {

/// Calls of operator new in this process so far, on all threads.
std::size_t n_allocations() noexcept;

/// The nth call of operator new on this thread from now on throws std::bad_alloc, or the next one
/// outside of c10d and Gloo: a connection is unusable after an exception in their own code. 0: none
/// does. Returns for how many calls one that was to fail still has waited.
int fail_allocation(int n) noexcept;

}  // namespace lockstep::test
