#pragma once

#include <lockstep/launch.hpp>
#include <string>

#include "world/session.hpp"

namespace lockstep::internal {

/// This rank's world as the variables of `launcher` (not infer) say. Throws UsageError naming the
/// variable and its value where one is missing, no number, or contradicts another.
World read_world(Launcher launcher);

/// The launcher and the variables that tell of a world of more than one rank; empty where the
/// environment tells of none. Throws UsageError where variables contradict.
std::string describe_world();

}  // namespace lockstep::internal
