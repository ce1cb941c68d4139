#pragma once

#include <csignal>
#include <optional>

#include "base/fd.hpp"

namespace lockstep::run {

struct Signal {
  int number;
  pid_t sender;  ///< for SIGCHLD: the child
};

/// Turns the signals a launcher cares about (SIGCHLD, SIGINT, SIGTERM, SIGHUP) into a descriptor
/// to poll, and ignores SIGPIPE and SIGXFSZ: a write that fails tells why. What the launcher was
/// started to ignore (nohup) stays ignored.
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
  /// Puts back what the launcher found when it started. Async-signal-safe: for a child.
  void restore() const noexcept;

 private:
  sigset_t old_mask_{};
  struct sigaction old_pipe_ {};
  struct sigaction old_file_size_ {};
  base::UniqueFd fd_;
};

}  // namespace lockstep::run
