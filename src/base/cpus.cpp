#include "base/cpus.hpp"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <exception>
#include <fstream>
#include <string>

#include "base/cgroup.hpp"

namespace lockstep::base {
namespace {

/// In v2 cpu.max holds "quota period" or "max period"; in v1 a quota of -1 is none.
int quota_of(const std::string& folder, CgroupVersion version) {
  long quota = 0;
  long period = 0;
  if (version == CgroupVersion::v2) {
    std::ifstream(folder + "/cpu.max") >> quota >> period;
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  if (quota <= 0 || period <= 0) return INT_MAX;
  return static_cast<int>(std::min<long>((quota + period - 1) / period, INT_MAX));
}

}  // namespace

CpuMask allowed_cpus(pid_t thread) noexcept {
  CpuMask mask{};
  // Not a cpu_set_t: the system fills nothing if it has more CPUs than the mask.
  if (::sched_getaffinity(thread, sizeof mask, reinterpret_cast<cpu_set_t*>(mask.data())) != 0)
    return {};
  return mask;
}

std::vector<int> allowed_cores() {
  const CpuMask mask = allowed_cpus();
  std::vector<int> cores;
  for (std::size_t cpu = 0; cpu < 64 * mask.size(); ++cpu) {
    if ((mask[cpu / 64] >> (cpu % 64) & 1U) != 0) cores.push_back(static_cast<int>(cpu));
  }
  return cores;
}

int cpu_quota(const std::string& root) noexcept {
  try {
    int quota = INT_MAX;
    for_each_cgroup(root, "cpu", [&](const std::string& folder, CgroupVersion version) {
      quota = std::min(quota, quota_of(folder, version));
    });
    return quota;
  } catch (const std::exception&) {
    return INT_MAX;  // no memory for a path: treated as no quota
  }
}

int n_usable_cores(const CpuMask& mask, int quota) noexcept {
  int n = 0;
  for (const std::uint64_t word : mask) n += std::popcount(word);
  return std::max(1, std::min(n, quota));
}

int n_usable_cores() noexcept { return n_usable_cores(allowed_cpus(), cpu_quota()); }

}  // namespace lockstep::base
