#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "nn/python/backend.hpp"

namespace lockstep::python {

/// The name of torch's default group.
inline constexpr std::string_view kWorld = "world";

struct Membership {
  int rank;
  int size;
  std::string name;  // of the group, for errors
  std::chrono::milliseconds timeout;
};

/// What the ranks of a group know of each other before they communicate.
struct Meeting {
  Membership membership;
  std::string job;         // of the ranks on one host, to find each other
  std::vector<int> hosts;  // for each rank the lowest rank on its host

  bool is_on_one_host() const {
    return std::all_of(hosts.begin(), hosts.end(), [](int host) { return host == 0; });
  }
};

/// Collective. Throws TimeoutError naming the ranks that did not come to the store, EngineError.
Meeting meet(c10d::Store& store, const Membership& membership, std::source_location where);

/// A group of the ranks that have met, over shared memory and, between hosts, over `between`, which
/// may be null on one host. Collective.
Backend::Joined join(const Meeting& meeting, c10::intrusive_ptr<c10d::ProcessGroup> between,
                     std::source_location where);

}  // namespace lockstep::python
