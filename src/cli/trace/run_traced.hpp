#pragma once

#include <functional>
#include <string>

#include "run/options.hpp"

namespace lockstep::cli::tracing {

/// Runs `launch`, whose ranks write their events to a folder next to `file`, and creates `file`
/// from it, however the ranks end; with several nodes, this node's file. Returns the result of
/// `launch`, or 1 if only the file failed: then standard error has the reason, and the folder
/// remains. Throws UsageError, before it calls `launch`, if the file cannot be created.
int run_traced(const std::string& file, const run::NodesOptions& nodes,
               const std::function<int()>& launch);

}  // namespace lockstep::cli::tracing
