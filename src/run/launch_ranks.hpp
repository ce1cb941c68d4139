#pragma once

#include "run/options.hpp"

namespace lockstep::run {

/// Starts the ranks of `lockstep run`, forwards their outputs to the caller's, and returns when all
/// of them and the processes they started have ended: with 0, or the exit code of the first rank
/// that failed (128 + n after signal n). Nothing is left running, even if the caller is killed.
/// Throws UsageError, SystemError, ExecError (errors.hpp) if the ranks cannot be started.
/// Threads: call it only from a single-threaded process.
int launch_ranks(const Options& options);

}  // namespace lockstep::run
