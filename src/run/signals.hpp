#pragma once

#include <csignal>
#include <optional>

#include "base/fd.hpp"

namespace lockstep::run {

struct Signal {
  int number;
  pid_t sender;  ///< for SIGCHLD: the child; 0: the kernel, for a key
};

/// Slurm's warnings before the end of a job (sbatch --signal=USR1@60): they end nothing.
constexpr bool is_warning(int signal) { return signal == SIGUSR1 || signal == SIGUSR2; }

/// Turns the launcher's signals (SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGTSTP) into
/// a descriptor for poll, and ignores SIGPIPE and SIGXFSZ: the failed write reports the error.
/// Signals that were ignored at the start (nohup) stay ignored.
class Signals {
 public:
  /// Throws SystemError.
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int fd() const noexcept { return fd_.get(); }
  /// The next signal, without waiting.
  std::optional<Signal> next() const;
  /// Stops this process by the signal, or its whole process group, and returns when it has been
  /// continued. Returns false, and at once, if no shell could continue it: the kernel stops no
  /// orphaned process group.
  static bool stop_by(int signal, bool whole_group) noexcept;
  /// Restores the state found at the start. Async-signal-safe: for a child.
  void restore() const noexcept;

 private:
  sigset_t old_mask_{};
  struct sigaction old_pipe_ {};
  struct sigaction old_file_size_ {};
  base::UniqueFd fd_;
};

}  // namespace lockstep::run
