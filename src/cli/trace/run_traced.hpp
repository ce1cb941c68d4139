#pragma once

#include <functional>
#include <string>

#include "run/options.hpp"

namespace lockstep::cli::tracing {

/// Runs `launch`, whose ranks leave what they do in a folder beside `file`, and makes `file` of it,
/// however they end; with several nodes, the file of this one. Returns what `launch` does, or 1
/// where only the file failed: then standard error says why, and the folder stays. Throws
/// UsageError where no such file can be made, before it calls `launch`.
int run_traced(const std::string& file, const run::NodesOptions& nodes,
               const std::function<int()>& launch);

}  // namespace lockstep::cli::tracing
