#pragma once

#include <malloc.h>
#include <torch/torch.h>

#include <lockstep/lockstep.hpp>
#include <stdexcept>

#include "../common.hpp"

namespace lockstep::bench {

/// Joins the world. A rank of one thread is bound to the core of its local number if there are
/// others on its host.
inline void init_rank(int n_threads = 1) {
  init_dist();
  torch::set_num_threads(n_threads);
  // Otherwise every activation is mapped and unmapped again, and all sides measure page faults.
  // More than 32 MiB is rejected.
  if (::mallopt(M_MMAP_THRESHOLD, 32 << 20) == 0 || ::mallopt(M_TRIM_THRESHOLD, 1 << 30) == 0) {
    throw std::runtime_error("mallopt refuses its limits: the figures would hold page faults");
  }
  if (n_threads == 1 && get_local_size() > 1) bind_to_core_of(get_local_rank());
}

}  // namespace lockstep::bench
