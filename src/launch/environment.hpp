#pragma once

#include <lockstep/launch.hpp>

#include "comm/session.hpp"

namespace lockstep::launch {

/// This rank's world as the variables of `launcher` (not infer) say. Throws UsageError naming the
/// variable and its value where one is missing, no number, or contradicts another.
comm::World read_world(Launcher launcher);

}  // namespace lockstep::launch
