#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "run/nodes.hpp"

namespace lockstep::run {

/// MASTER_PORT as the user set it, or a port that is free now on the loopback address. Throws
/// UsageError where the variable is no port, SystemError.
std::uint16_t master_port();

/// Cores the launcher may run on, by number.
std::vector<int> allowed_cores();

/// What all ranks of one world have in common.
struct WorldEnvironment {
  int n_ranks;  ///< of this machine
  Placement placement;
  std::string segment;  ///< Job::environment()
  int n_restarts;       ///< how often the world was started before
  int n_threads;        ///< OMP_NUM_THREADS, unless the user has set it
};

/// The launcher's environment with the variables of one rank of this machine, as NAME=value.
std::vector<std::string> rank_environment(const WorldEnvironment& world, int local_rank);

}  // namespace lockstep::run
