#pragma once

#include <string>
#include <vector>

#include "cli/command.hpp"
#include "faults/campaign_trials.hpp"

// What the campaign does to a job from outside, beside the fault in it.
namespace lockstep::test {

/// Waits until all ranks have joined, and does what `load` says: "stopped-launcher" stops the
/// launcher until `reports` are there, "garbage" sends bytes to the ports of its processes. Others:
/// nothing. `reports`: names of files of `folder` to come.
void do_to_job(const std::string& load, const Command& command, const std::string& folder,
               int n_ranks, const std::vector<std::string>& reports);

/// A shell's line for a rank of a training, which leaves in `folder` its pid and what it prints.
std::string training_rank(const Trial& trial, const std::string& folder);
/// Kills or stops the victim of a training after its steps, and notes when in `folder`, unless the
/// job ends before.
void fail_training(const Trial& trial, const Command& command, const std::string& folder);

}  // namespace lockstep::test
