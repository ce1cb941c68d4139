#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "run/rank_layout.hpp"

namespace lockstep::run {

/// Sets master_port: MASTER_PORT as set by the user, or a free port of the loopback address. The
/// free port is bound as long as port_holder lives, so that no other program gets it as a free one,
/// but it can be listened on with SO_REUSEADDR, as every store does. Throws UsageError if the
/// variable is not a port, SystemError.
void choose_master_port(RankLayout& placement);

/// Common to all ranks of one world.
struct WorldEnvironment {
  int n_ranks;  ///< of this machine
  RankLayout placement;
  std::string segment;  ///< Job::environment()
  bool is_replacement;  ///< joins the next generation of an elastic world
  int n_restarts;       ///< number of earlier starts of the world
  int max_restarts;
  int n_threads;  ///< OMP_NUM_THREADS, unless the user has set it
};

/// The launcher's environment with the variables of one rank of this machine, as NAME=value.
/// `socket`: the rank's end to the launcher.
std::vector<std::string> rank_environment(const WorldEnvironment& world, int local_rank,
                                          int socket);

}  // namespace lockstep::run
