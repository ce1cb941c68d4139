#pragma once

#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <optional>

namespace lockstep::run {

/// A child that leads a process group of its own, until it is reaped; or none. Ranks are signalled
/// and waited for by this class alone, not by kill() and waitpid(), for which 0 and -1 are the
/// caller's own group and all processes: what is sent to none, or to a child that was reaped, goes
/// nowhere.
class ChildGroup {
 public:
  ChildGroup() = default;
  explicit ChildGroup(pid_t leader) : leader_(leader), is_running_(leader > 0) {}

  pid_t leader() const noexcept { return leader_; }  ///< for texts, also after its end
  /// Sends a signal to all processes of the group. Returns whether there are any.
  bool signal(int number) const noexcept { return is_running_ && ::kill(-leader_, number) == 0; }
  bool signal_leader(int number) const noexcept {
    return is_running_ && ::kill(leader_, number) == 0;
  }
  /// Sends a signal to one process, if it is in the group.
  bool signal_member(pid_t process, int number) const noexcept {
    return is_running_ && process > 0 && ::getpgid(process) == leader_ &&
           ::kill(process, number) == 0;
  }
  /// How the leader ended, which is not reaped by this; nullopt: it runs.
  std::optional<siginfo_t> ending() const noexcept {
    siginfo_t info{};
    if (!is_running_ ||
        ::waitid(P_PID, static_cast<id_t>(leader_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid != leader_) {
      return std::nullopt;
    }
    return info;
  }
  /// The signal that stopped the leader, once for each time; nullopt: none has since.
  std::optional<int> stop_signal() const noexcept {
    siginfo_t info{};
    if (!is_running_ ||
        ::waitid(P_PID, static_cast<id_t>(leader_), &info, WSTOPPED | WNOHANG) != 0 ||
        info.si_pid != leader_) {
      return std::nullopt;
    }
    return info.si_status;
  }
  /// Waits for the leader's end. Its number is free for another process then.
  void reap() noexcept {
    while (is_running_ && ::waitpid(leader_, nullptr, 0) < 0 && errno == EINTR) {
    }
    is_running_ = false;
  }

 private:
  pid_t leader_ = 0;
  bool is_running_ = false;
};

}  // namespace lockstep::run
