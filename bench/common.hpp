#pragma once

#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <vector>

/// Common to benchmarks whose ranks are started by a launcher.
namespace lockstep::bench {

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// Binds to a core of its own under any launcher: the local_rank-th of the allowed cores. If there
/// are fewer, does not bind.
inline void bind_to_core_of(int local_rank) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  int n_before = 0;
  for (std::size_t core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || n_before++ != local_rank) continue;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(core, &own);
    ::sched_setaffinity(0, sizeof own, &own);
  }
}

}  // namespace lockstep::bench
