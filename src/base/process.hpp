#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/fd.hpp"
#include "base/guarded_fd.hpp"

namespace lockstep::base {

/// State of another process: alive (running, sleeping, stopped; `alive`: no details known), gone,
/// or unknown. An unknown state is never reported as gone.
enum class ProcessState : std::uint8_t { running, sleeping, stopped, alive, gone, unknown };

/// Start time of a process in clock ticks since boot, the same in every time namespace to within
/// one tick. With the pid it identifies the process. 0: no such process, or /proc does not say.
std::uint64_t process_start_time(pid_t pid) noexcept;

/// Inode of the process's pidfds, which no other process ever has while the system runs. 0: no such
/// process, or Linux before 6.9.
std::uint64_t pidfd_inode(pid_t pid) noexcept;

/// A descriptor that is readable when the process has ended; none if there is no such process, no
/// descriptor is left, or the system has no pidfds.
UniqueFd open_pidfd(pid_t pid) noexcept;

/// The data by which other processes identify a process.
struct ProcessIdentity {
  pid_t pid;
  std::uint64_t start_time;   ///< see process_start_time
  std::uint64_t pidfd_inode;  ///< see pidfd_inode
};

/// State of the process in this PID namespace with this pid and start time. A zombie is gone; a
/// process whose main thread has ended while others run is alive. `spare`: used if no descriptor
/// is left.
ProcessState process_state(pid_t pid, std::uint64_t start_time,
                           ReservedFd* spare = nullptr) noexcept;

/// Another process, with the data to query its state later. Threads: one at a time.
class WatchedProcess {
 public:
  WatchedProcess() = default;
  /// A process in this PID namespace. start_time 0: its current one. Without `keeps_pidfd`, or if
  /// the system has no pidfds, each query reads /proc.
  WatchedProcess(const ProcessIdentity& identity, bool keeps_pidfd) noexcept;

  bool is_known() const noexcept { return pid_ > 0; }
  bool is_gone(ReservedFd& spare) const noexcept;
  ProcessState state(ReservedFd& spare) const noexcept;

 private:
  ProcessState query_pidfd() const noexcept;

  pid_t pid_ = 0;
  std::uint64_t start_time_ = 0;
  GuardedFd pidfd_;
};

/// Id of this process's namespace of a `kind` ("pid", "time", ...), unique in the running system;
/// 0: not available from /proc.
std::uint64_t namespace_of(const char* kind) noexcept;

/// Identifies the running system until it is booted again; empty: unknown.
std::string boot_id();

/// Resource usage of a process so far; zeros if it does not exist.
struct ProcessUse {
  double cpu_s = 0;                ///< user and system, all threads
  std::uint64_t memory_bytes = 0;  ///< resident
};
ProcessUse process_use(pid_t pid) noexcept;

}  // namespace lockstep::base
