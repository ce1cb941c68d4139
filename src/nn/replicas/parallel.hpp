#pragma once

#include <cstddef>
#include <functional>

namespace lockstep::nn {

/// Calls f(first, n) for parts of [0, n) on libtorch's threads, and returns when all are done.
/// Each of n has `n_values`; if the total is small, there is one part, on the calling thread.
void in_parallel(std::size_t n, std::size_t n_values,
                 const std::function<void(std::size_t first, std::size_t n)>& f);

}  // namespace lockstep::nn
