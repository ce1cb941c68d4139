#pragma once

#include <sys/resource.h>

#include <optional>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "run/child_group.hpp"
#include "run/guard.hpp"
#include "run/signals.hpp"

namespace lockstep::run {

/// Looks a program up as a shell does: a name with a slash is a path, another is searched for in
/// PATH. Throws ExecError if there is no such executable.
std::string find_program(const std::string& name);

/// Whether a program is linked with lockstep. False for scripts and their interpreters, and for
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
  std::vector<int> inherited_fds;  ///< remain open in the program, under the same numbers
  std::optional<int> cpu;          ///< the only core it may run on
  rlimit open_files;
};

/// Starts programs, each while those before it still load.
class ProcessStarter {
 public:
  /// Both must live as long as this.
  ProcessStarter(const Guard& guard, const Signals& signals);

  /// Starts the program as leader of its own process group, which is on the guard's list; the
  /// program is killed when the calling thread exits. The caller waits for the process, also if
  /// this or another one cannot run its program. Throws SystemError.
  /// All descriptors must be above 2, except stdin_fd, which may be 0.
  ChildGroup start(const ProcessSpec& spec);
  /// Returns when all programs run. Throws ExecError if one cannot.
  void wait();

 private:
  const Guard& guard_;
  const Signals& signals_;
  base::UniqueFd read_end_, write_end_;
  std::string program_;  // the last
};

}  // namespace lockstep::run
