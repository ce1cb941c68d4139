#pragma once

#include <sys/types.h>

#include <cstdint>

#include "base/kept_fd.hpp"

namespace lockstep::base {

/// What can be said of another process: it lives (and how it fares; `alive`: that is not known), it
/// is gone, or it cannot be told. What cannot be told is never "gone".
enum class ProcessState : std::uint8_t { running, sleeping, stopped, alive, gone, unknown };

/// When a process started, in clock ticks since boot, the same in every time namespace but for one
/// tick: with the pid, its identity. 0: no such one, or /proc does not say.
std::uint64_t process_start_time(pid_t pid) noexcept;

/// State of the process of this PID namespace that has this pid and start time. A zombie is gone;
/// one whose main thread has ended while others run is alive. `spare`: used where no descriptor is
/// left.
ProcessState process_state(pid_t pid, std::uint64_t start_time, SpareFd* spare = nullptr) noexcept;

/// Another process, with what is needed to ask about it later. Threads: one at a time.
class WatchedProcess {
 public:
  WatchedProcess() = default;
  /// One of this PID namespace. start_time: what it read of itself; 0: as it is now. Without
  /// `keeps_pidfd`, or where the system has none, /proc is asked each time.
  WatchedProcess(pid_t pid, std::uint64_t start_time, bool keeps_pidfd) noexcept;

  bool is_known() const noexcept { return pid_ > 0; }
  bool is_gone(SpareFd& spare) const noexcept;
  ProcessState state(SpareFd& spare) const noexcept;

 private:
  ProcessState ask_pidfd() const noexcept;

  pid_t pid_ = 0;
  std::uint64_t start_time_ = 0;
  KeptFd pidfd_;
};

/// Numbers of the namespaces of this process, among those of the running system; 0: /proc does not
/// say. `kind`: "pid", "time", ...
std::uint64_t namespace_of(const char* kind) noexcept;

/// What a process has used so far; zeros where there is none.
struct ProcessUse {
  double cpu_s = 0;                ///< user and system, all threads
  std::uint64_t memory_bytes = 0;  ///< resident
};
ProcessUse process_use(pid_t pid) noexcept;

}  // namespace lockstep::base
