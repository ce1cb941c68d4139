#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "run/nodes.hpp"

namespace lockstep::run {

/// MASTER_PORT as set by the user, or a port that is free now on the loopback address. Throws
/// UsageError if the variable is not a port, SystemError.
std::uint16_t master_port();

/// Cores the launcher may run on.
std::vector<int> allowed_cores();

/// Common to all ranks of one world.
struct WorldEnvironment {
  int n_ranks;  ///< of this machine
  Placement placement;
  std::string segment;  ///< Job::environment()
  int n_restarts;       ///< number of earlier starts of the world
  int n_threads;        ///< OMP_NUM_THREADS, unless the user has set it
};

/// The launcher's environment with the variables of one rank of this machine, as NAME=value.
std::vector<std::string> rank_environment(const WorldEnvironment& world, int local_rank);

}  // namespace lockstep::run
