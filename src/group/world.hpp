#pragma once

#include <cstdint>
#include <lockstep/elastic.hpp>
#include <lockstep/env.hpp>
#include <lockstep/world.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::shared {
class Membership;
}

namespace lockstep::internal {

/// This rank's world, as reported by its launcher.
struct World {
  Launcher launcher = Launcher::none;
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::optional<std::string> segment;  ///< LOCKSTEP_SEGMENT
  /// An id shared by this job's ranks on this host, unique among concurrent jobs of this user;
  /// empty if the launcher gives none.
  std::string job;
  /// The MPI that started the world, or that LOCKSTEP_MPI names: openmpi, mpich or the path of a
  /// module; empty if there is none.
  std::string mpi{};
  /// UCX_TLS, or all but shared memory: ranks of one host meet in ours.
  std::string ucx_transports = "^sm,self";
  std::string ucx_devices = "all";  ///< for messages: UCX reads the variable itself
  Env env{};
  /// In the memory that `lockstep run` has made for this host's ranks; null: in none. Set by the
  /// engine, as the next two.
  std::shared_ptr<shared::Membership> host = nullptr;
  std::vector<int> hosts{};  ///< for each rank the lowest one on its host; empty: not known
  bool is_elastic = false;
  std::int64_t last_generation = -1;  ///< in which this process was a rank; -1: none
  /// Of an elastic world: what has changed since then. Set by the engine.
  Regrouped regrouped{};
};

}  // namespace lockstep::internal
