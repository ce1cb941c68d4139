#pragma once

#include "engines/hierarchical/levels.hpp"

namespace lockstep::hierarchical {

/// Performs a call over several hosts, in steps within hosts and between their leaders. Not a split
/// or an allocation.
void run_over_hosts(Levels& levels, const Call& call);

}  // namespace lockstep::hierarchical
