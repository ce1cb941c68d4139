#pragma once

#include <cstddef>
#include <string>

namespace lockstep::base {

/// Bytes the system could give to this process now, without ending one: what is free or could be
/// freed, of the machine and of each control group (cgroup v1 and v2) that the process is in. A
/// large number where the system does not say. `root`: stands before /proc and /sys, for tests.
std::size_t available_memory(const std::string& root = {}) noexcept;

/// Asks for the line at `at`, for this core alone. Not __builtin_prefetch, which for the least
/// x86-64 fetches a line to read.
inline void prefetch_to_write(const void* at) noexcept {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
  __builtin_prefetch(at, /*rw=*/1);
#endif
}

}  // namespace lockstep::base
