#pragma once

namespace lockstep::base {

/// Closes all descriptors from `first` on: for a process that was forked and runs no program.
void close_from(int first);

}  // namespace lockstep::base
