#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.hpp"

/// What launchers tell each other of their ranks.
namespace lockstep::run {

/// Position of one launcher's ranks in their world.
struct RankLayout {
  int node_rank = 0;
  int n_nodes = 1;
  int first_rank = 0;
  int world_size = 0;
  std::string master_addr;
  std::uint16_t master_port = 0;
  std::string run_id;     ///< TORCHELASTIC_RUN_ID: the same on all nodes and after a restart
  std::uint32_t key = 0;  ///< of several nodes: the same on all, and hardly in another job
  /// The network interface over which the nodes reached each other; empty: one node, or unknown.
  std::string interface {};
  /// Holds the port until rank 0 listens on it: see choose_master_port. Null: the user's port.
  std::shared_ptr<const base::UniqueFd> port_holder = nullptr;
  std::vector<int> ranks_of{};  ///< by node
  /// Of this launcher in an elastic job of several nodes: 1, or more if it joins a running one.
  int incarnation = 1;

  /// Of a place of the job: they are numbered from those of node 0 on.
  int node_of(int place) const {
    int node = 0;
    for (; node + 1 < n_nodes && place >= ranks_of[static_cast<std::size_t>(node)]; ++node) {
      place -= ranks_of[static_cast<std::size_t>(node)];
    }
    return node;
  }
};

/// Why a failure on another node ends this node's ranks.
struct NodeFailure {
  int exit_code;
  bool interrupted;  ///< by a signal to a launcher: no restart
  std::string text;
  int rank = -1;  ///< of the world, that failed; -1: unknown
};

/// What a rank of any node tells the others of its world: see shared::exchange_addresses.
struct RankAddress {
  int rank;
  std::uint64_t world;
  std::string bytes;
};

/// What a rank asks of the store on node 0, or the answer: see shared::ask_store.
struct StoreMessage {
  int node = 0;       ///< of the rank
  int place = 0;      ///< of the rank in the job
  pid_t process = 0;  ///< of the place
  std::uint64_t number = 0;
  std::uint64_t world = 0;
  std::string bytes{};
};

}  // namespace lockstep::run
