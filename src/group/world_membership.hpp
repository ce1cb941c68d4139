#pragma once

#include <atomic>
#include <cstdint>

#include "group/async_groups.hpp"

namespace lockstep::internal {

/// A rank's membership in a world, shared by the world's group and the groups split from it. That
/// of a group over an engine of the program's own never ends.
struct WorldMembership {
  std::uint64_t generation = 0;        ///< of an elastic world; otherwise 0
  std::atomic<bool> has_ended{false};  ///< the rank has left the world
  AsyncGroups async_groups;
};

}  // namespace lockstep::internal
