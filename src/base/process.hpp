#pragma once

#include <sys/types.h>

#include <cstdint>

namespace lockstep::base {

enum class ProcessState : std::uint8_t { running, sleeping, stopped, dead };

/// When a process started, in clock ticks since boot: with the pid, its identity. 0: no such one.
std::uint64_t process_start_time(pid_t pid) noexcept;

/// State of the process that has this pid and start time; a zombie is dead.
ProcessState process_state(pid_t pid, std::uint64_t start_time) noexcept;

/// What a process has used so far; zeros where there is none.
struct ProcessUse {
  double cpu_s = 0;                ///< user and system, all threads
  std::uint64_t memory_bytes = 0;  ///< resident
};
ProcessUse process_use(pid_t pid) noexcept;

}  // namespace lockstep::base
