#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

#include "python/torch/backend.hpp"

namespace lockstep::python {

struct Membership {
  int rank;
  int size;
  std::string name;  // of the group, for errors
  std::chrono::milliseconds timeout;
};

/// A group of the ranks that meet in `store`: over shared memory. Collective. Throws TimeoutError
/// naming the ranks that did not come, EngineError if they are on several hosts.
Backend::Joined join(c10d::Store& store, const Membership& membership, std::source_location where);

}  // namespace lockstep::python
