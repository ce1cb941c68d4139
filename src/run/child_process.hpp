#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "run/guard.hpp"
#include "run/signals.hpp"

namespace lockstep::run {

/// Looks a program up as a shell does: a name with a slash is a path, another is searched for in
/// PATH. Throws ExecError where there is none that may be run.
std::string find_program(const std::string& name);

/// Whether a program was linked with lockstep. False for scripts and their interpreters, and for
/// the `lockstep` command itself.
bool links_lockstep(const std::string& path);

/// A rank to start.
struct ProcessSpec {
  std::string program;                   ///< a path
  std::vector<std::string> arguments;    ///< argv, the program's own name first
  std::vector<std::string> environment;  ///< NAME=value
  int stdin_fd;
  int stdout_fd;
  int stderr_fd;
  int inherited_fd;        ///< stays open in the program, under the same number
  std::optional<int> cpu;  ///< the one core it may run on
  rlimit open_files;
};

/// Starts the program as the leader of its own process group, which dies with the calling thread
/// and is on the guard's list, and returns when it runs. Throws ExecError where exec fails,
/// SystemError where it does not come to that; nothing is left running then.
/// All descriptors must be above 2, but stdin_fd, which may be 0.
pid_t start_process(const ProcessSpec& spec, const Guard& guard, const Signals& signals);

}  // namespace lockstep::run
