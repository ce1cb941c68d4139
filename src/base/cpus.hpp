#pragma once

#include <array>
#include <cstdint>

namespace lockstep::base {

/// Which cores, of the first 1,024, a thread may run on.
using CpuMask = std::array<std::uint64_t, 16>;

/// The calling thread's affinity.
CpuMask allowed_cpus() noexcept;

/// Cores that the cgroup's quota is worth, rounded up; a large number where there is no quota.
int cpu_quota() noexcept;

}  // namespace lockstep::base
