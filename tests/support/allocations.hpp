#pragma once

#include <cstddef>

namespace lockstep::test {

/// Calls of operator new in this process so far, on all threads.
std::size_t n_allocations() noexcept;

}  // namespace lockstep::test
