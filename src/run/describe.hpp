#pragma once

#include <chrono>
#include <string>
#include <vector>

/// Parts of the launcher's lines.
namespace lockstep::run {

/// "SIGTERM"
std::string name_of_signal(int signal);
/// Of a waitpid status: 128 + n for signal n.
int exit_code_of(int wait_status);
/// Of a waitpid status: "exited with code 3"
std::string how_ended(int wait_status);
double seconds(std::chrono::nanoseconds duration);
/// "rank 1", "ranks 1 and 3", "ranks 0, 1, 2 and 61 more".
std::string list_of(const std::vector<int>& ranks);

}  // namespace lockstep::run
