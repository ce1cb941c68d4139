#include "base/memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <exception>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

namespace lockstep::base {
namespace {

/// The number in a file that contains nothing else; nullopt if there is none (for example "max").
std::optional<std::uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  file >> text;
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
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

/// Whether a comma-separated list contains `wanted`.
bool has_word(const std::string& list, std::string_view wanted) {
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    if (word == wanted) return true;
  }
  return false;
}

/// Where a hierarchy is mounted, and which of its groups is the root of the mount.
struct CgroupMount {
  std::string point;
  std::string group;
};

/// `wanted`: among the super options of the mount ("memory" for v1); empty: any.
std::optional<CgroupMount> cgroup_mount(const std::string& root, std::string_view type,
                                        std::string_view wanted) {
  std::ifstream file(root + "/proc/self/mountinfo");
  // ID parent major:minor ROOT POINT options [optional fields] - TYPE source SUPER_OPTIONS
  for (std::string line; std::getline(file, line);) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream front(line.substr(0, dash));
    std::istringstream back(line.substr(dash + 3));
    std::string skipped;
    CgroupMount mount;
    std::string mount_type;
    std::string options;
    front >> skipped >> skipped >> skipped >> mount.group >> mount.point;
    back >> mount_type >> skipped >> options;
    if (mount_type != type) continue;
    if (wanted.empty() || has_word(options, wanted)) return mount;
  }
  return std::nullopt;
}

/// The minimum over a group and its parents: a limit on any of them applies to this one too.
std::size_t available_under(const std::string& root, const CgroupMount& mount,
                            const std::string& group, const CgroupFiles& files) {
  std::string path = group;
  // Without a cgroup namespace a container sees its own group as the root of the mount.
  if (mount.group != "/" && path.starts_with(mount.group)) path.erase(0, mount.group.size());
  if (path.find("..") != std::string::npos) path.clear();  // outside of the visible hierarchy
  std::size_t available = SIZE_MAX;
  while (true) {
    while (path.ends_with('/')) path.pop_back();
    std::string folder = root;
    folder.append(mount.point).append(path);
    available = std::min(available, available_in_cgroup(folder, files));
    if (path.empty()) return available;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

std::size_t available_in_cgroups(const std::string& root) {
  std::size_t available = SIZE_MAX;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    // NUMBER:CONTROLLERS:PATH; v2 has no controllers there.
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_v2 = controllers.empty();
    if (!is_v2 && !has_word(controllers, "memory")) continue;
    const auto mount =
        is_v2 ? cgroup_mount(root, "cgroup2", "") : cgroup_mount(root, "cgroup", "memory");
    if (!mount) continue;
    available = std::min(available,
                         available_under(root, *mount, line.substr(second + 1), is_v2 ? kV2 : kV1));
  }
  return available;
}

}  // namespace

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
