#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::base {

/// Which cores a thread may run on: of the first 8,192, the most that Linux supports.
using CpuMask = std::array<std::uint64_t, 128>;

/// The affinity of a thread; 0: the calling one; the process's id: the main one.
CpuMask allowed_cpus(pid_t thread = 0) noexcept;

/// The cores that the calling thread may run on, in order.
std::vector<int> allowed_cores();

/// The CPU quota in cores, rounded up, of this process's cgroups (v1 and v2); a large number if
/// there is none. `root`: prefix of /proc and /sys, for tests.
int cpu_quota(const std::string& root = {}) noexcept;

/// How many cores threads with this affinity and quota can use together: at least 1.
int n_usable_cores(const CpuMask& mask, int quota) noexcept;
/// The same of this thread.
int n_usable_cores() noexcept;

}  // namespace lockstep::base
