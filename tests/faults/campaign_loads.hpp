#pragma once

#include <string>
#include <vector>

#include "cli/command.hpp"

// What the campaign does to a job from outside, beside the fault in it.
namespace lockstep::test {

/// Waits until all ranks have joined, and does what `load` says: "stopped-launcher" stops the
/// launcher until `reports` are there, "garbage" sends bytes to the ports of its processes. Others:
/// nothing. `reports`: names of files of `folder` to come.
void do_to_job(const std::string& load, const Command& command, const std::string& folder,
               int n_ranks, const std::vector<std::string>& reports);

}  // namespace lockstep::test
