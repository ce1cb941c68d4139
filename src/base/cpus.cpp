#include "base/cpus.hpp"

#include <sched.h>

#include <climits>
#include <cstdio>
#include <fstream>
#include <string>

namespace lockstep::base {
namespace {

/// The v2 group of this process: the line "0::/path" of /proc/self/cgroup.
std::string cgroup_path() {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("0::")) return line.substr(3);
  }
  return {};
}

/// A cpu.max file holds "quota period" or "max period".
int quota_of(const std::string& directory) {
  std::ifstream file(directory + "/cpu.max");
  long quota = 0;
  long period = 0;
  if (!(file >> quota >> period) || quota <= 0 || period <= 0) return INT_MAX;
  return static_cast<int>((quota + period - 1) / period);
}

}  // namespace

CpuMask allowed_cpus() noexcept {
  CpuMask mask{};
  static_assert(sizeof(cpu_set_t) == sizeof(CpuMask));
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return mask;
  for (std::size_t cpu = 0; cpu < 64 * mask.size(); ++cpu) {
    if (CPU_ISSET(cpu, &set)) mask[cpu / 64] |= std::uint64_t{1} << (cpu % 64);
  }
  return mask;
}

int cpu_quota() noexcept {
  try {
    int quota = INT_MAX;
    // A limit on any parent group applies to this one too.
    for (std::string path = cgroup_path(); !path.empty();
         path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'))) {
      quota = std::min(quota, quota_of("/sys/fs/cgroup" + (path == "/" ? "" : path)));
    }
    return quota;
  } catch (const std::exception&) {
    return INT_MAX;  // no memory for a path: treated as no quota
  }
}

}  // namespace lockstep::base
