#pragma once

#include <malloc.h>
#include <sched.h>
#include <torch/torch.h>

#include <algorithm>
#include <lockstep/lockstep.hpp>
#include <stdexcept>
#include <vector>

/// What the benchmarks of `lockstep run` have in common.
namespace lockstep::bench {

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// Joins, with one thread on the core of this rank's local number.
inline void init_rank() {
  init_dist();
  torch::set_num_threads(1);
  // Else every activation is mapped and unmapped anew, and all sides measure page faults.
  // More than 32 MiB is refused.
  if (::mallopt(M_MMAP_THRESHOLD, 32 << 20) == 0 || ::mallopt(M_TRIM_THRESHOLD, 1 << 30) == 0) {
    throw std::runtime_error("mallopt refuses its limits: the figures would hold page faults");
  }
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<std::size_t>(get_local_rank()), &cores);
  ::sched_setaffinity(0, sizeof cores, &cores);
}

}  // namespace lockstep::bench
