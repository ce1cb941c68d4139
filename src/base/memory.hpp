#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace lockstep::base {

/// Bytes that the system could give to this process now without killing a process: free and
/// reclaimable memory of the machine and of each cgroup (v1 and v2) of this process. A large number
/// if the system does not report it. `root`: prefix of /proc and /sys, for tests.
std::size_t available_memory(const std::string& root = {}) noexcept;

/// The least memory limit of this process's cgroups (v1 and v2); nullopt if there is none.
std::optional<std::size_t> memory_limit();

/// Allocates memory for the pages of [at, at + n_bytes) and maps them for write, in one system call
/// instead of a fault for each page. Returns an error number; EINVAL: the kernel cannot (before
/// 5.14).
int populate_to_write(void* at, std::size_t n_bytes) noexcept;

/// Prefetches the line at `at` for write (RFO). Not __builtin_prefetch, which on baseline x86-64
/// prefetches for read.
inline void prefetch_to_write(const void* at) noexcept {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
  __builtin_prefetch(at, /*rw=*/1);
#endif
}

}  // namespace lockstep::base
