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

/// Collective. Throws TimeoutError naming the ranks that did not come to the store, EngineError.
Meeting meet(c10d::Store& store, const Membership& membership, std::source_location where);

}  // namespace lockstep::python
