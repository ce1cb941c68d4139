#pragma once

#include <array>
#include <cstdint>

namespace lockstep::base {

/// Which cores, of the first 1,024, a thread may run on.
using CpuMask = std::array<std::uint64_t, 16>;

/// The calling thread's affinity.
CpuMask allowed_cpus() noexcept;

/// The cgroup's CPU quota in cores, rounded up; a large number if there is no quota.
int cpu_quota() noexcept;

}  // namespace lockstep::base
