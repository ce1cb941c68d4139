#pragma once

#include <cstddef>
#include <functional>

namespace lockstep::nn {

/// Calls f(first, n) for parts of [0, n) on libtorch's threads, and returns when all are done;
/// `n_values` belong to each of n, and few of them in all are one part, on this thread.
void in_parallel(std::size_t n, std::size_t n_values,
                 const std::function<void(std::size_t first, std::size_t n)>& f);

}  // namespace lockstep::nn
