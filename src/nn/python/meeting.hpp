#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <source_location>
#include <string>
#include <vector>

namespace lockstep::python {

struct Membership {
  int rank;
  int size;
  std::string name;  // of the group, for errors
  std::chrono::milliseconds timeout;
};

/// What the ranks of a group know of each other before they communicate.
struct Meeting {
  struct Process {
    pid_t pid = 0;
    std::uint64_t start_time = 0;
  };

  Membership membership;
  std::string job;                 // of the ranks on one host, to find each other
  std::vector<int> hosts;          // for each rank the lowest rank on its host
  std::vector<Process> processes;  // for each rank, on its host

  bool is_on_one_host() const {
    return std::all_of(hosts.begin(), hosts.end(), [](int host) { return host == 0; });
  }
  /// Whether the rank's process has ended; false if this rank cannot tell.
  bool is_gone(int rank) const;
};

/// Where the ranks of a group are in one that they have met in before.
struct Earlier {
  const Meeting* meeting = nullptr;  // null: none
  std::vector<int> ranks;            // for each rank of the group its rank there

  bool is_gone(int rank) const {
    return meeting != nullptr && meeting->is_gone(ranks[static_cast<std::size_t>(rank)]);
  }
};

/// Collective. Throws PeerLost naming a rank that has ended before it came to the store,
/// TimeoutError naming the ranks that did not come, EngineError.
Meeting meet(c10d::Store& store, const Membership& membership, const Earlier& earlier,
             std::source_location where);

}  // namespace lockstep::python
