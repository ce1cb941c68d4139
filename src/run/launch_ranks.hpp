#pragma once

#include "run/options.hpp"

namespace lockstep::run {

/// Starts the ranks of `lockstep run`, carries their outputs to the caller's, and returns when all
/// of them, and what they started, have ended: with 0, or the exit code of the rank that failed
/// first (128 + n after signal n). Nothing is left running, even when the caller is killed.
/// Throws UsageError, SystemError, ExecError (errors.hpp) where the ranks cannot be started.
/// Threads: of a process with one thread.
int launch_ranks(const Options& options);

}  // namespace lockstep::run
