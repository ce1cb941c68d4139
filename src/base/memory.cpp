#include "base/memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

#include "base/cgroup.hpp"
#include "base/number.hpp"

namespace lockstep::base {
namespace {

/// The number in a file that contains nothing else; nullopt if there is none (for example "max").
std::optional<std::uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  file >> text;
  return parse_number<std::uint64_t>(text);
}

/// The number after `name` in a file of lines "name number".
std::optional<std::uint64_t> number_after(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string first;
    std::uint64_t number = 0;
    if (words >> first >> number && first == name) return number;
  }
  return std::nullopt;
}

std::size_t available_in_machine(const std::string& root) {
  const auto n_kib = number_after(root + "/proc/meminfo", "MemAvailable:");
  return n_kib ? *n_kib * 1024 : SIZE_MAX;
}

/// The file names of one cgroup version.
struct CgroupFiles {
  const char* limit;
  const char* usage;
  /// File pages count as used, but are reclaimed when a process needs memory.
  const char* active_file;
  const char* inactive_file;
};
constexpr CgroupFiles kV1 = {"/memory.limit_in_bytes", "/memory.usage_in_bytes",
                             "total_active_file", "total_inactive_file"};
constexpr CgroupFiles kV2 = {"/memory.max", "/memory.current", "active_file", "inactive_file"};

std::size_t available_in_cgroup(const std::string& folder, const CgroupFiles& files) {
  const auto limit = number_in(folder + files.limit);
  const auto usage = number_in(folder + files.usage);
  if (!limit || !usage) return SIZE_MAX;
  const std::string stat = folder + "/memory.stat";
  const std::uint64_t used =
      *usage - std::min(*usage, number_after(stat, files.active_file).value_or(0) +
                                    number_after(stat, files.inactive_file).value_or(0));
  return *limit - std::min(*limit, used);
}

std::size_t available_in_cgroups(const std::string& root) {
  std::size_t available = SIZE_MAX;
  for_each_cgroup(root, "memory", [&](const std::string& folder, CgroupVersion version) {
    available =
        std::min(available, available_in_cgroup(folder, version == CgroupVersion::v1 ? kV1 : kV2));
  });
  return available;
}

}  // namespace

std::optional<std::size_t> memory_limit() {
  constexpr std::size_t kNone = std::size_t{1} << 60U;  // v1 writes the largest number of pages
  std::size_t least = kNone;
  for_each_cgroup({}, "memory", [&](const std::string& folder, CgroupVersion version) {
    const CgroupFiles& files = version == CgroupVersion::v1 ? kV1 : kV2;
    least = std::min(least, number_in(folder + files.limit).value_or(kNone));
  });
  return least < kNone ? std::optional(least) : std::nullopt;
}

std::size_t available_memory(const std::string& root) noexcept try {
  return std::min(available_in_machine(root), available_in_cgroups(root));
} catch (const std::exception&) {
  return SIZE_MAX;  // no memory for a path: treated as unknown
}

int populate_to_write(void* at, std::size_t n_bytes) noexcept {
#ifdef MADV_POPULATE_WRITE
  constexpr std::uintptr_t kPage = 4096;
  const auto begin = reinterpret_cast<std::uintptr_t>(at);
  const std::uintptr_t page = begin / kPage * kPage;  // madvise takes whole pages only
  return ::madvise(reinterpret_cast<void*>(page), begin + n_bytes - page, MADV_POPULATE_WRITE) == 0
             ? 0
             : errno;
#else
  static_cast<void>(at);
  static_cast<void>(n_bytes);
  return EINVAL;
#endif
}

}  // namespace lockstep::base
