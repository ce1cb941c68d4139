#pragma once

#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

/// Which control groups this process is in, of both versions.
namespace lockstep::base {

enum class CgroupVersion { v1, v2 };

namespace detail {

/// Whether a comma-separated list contains `wanted`.
inline bool has_word(const std::string& list, std::string_view wanted) {
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
inline std::optional<CgroupMount> cgroup_mount(const std::string& root, std::string_view type,
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

/// A group and its parents: a limit on any of them applies to the process too.
template <class Use>
void for_each_parent(const std::string& root, const CgroupMount& mount, const std::string& group,
                     Use use) {
  std::string path = group;
  // Without a cgroup namespace a container sees its own group as the root of the mount.
  if (mount.group != "/" && path.starts_with(mount.group)) path.erase(0, mount.group.size());
  if (path.find("..") != std::string::npos) path.clear();  // outside of the visible hierarchy
  while (true) {
    while (path.ends_with('/')) path.pop_back();
    std::string folder = root;
    folder.append(mount.point).append(path);
    use(folder);
    if (path.empty()) return;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

}  // namespace detail

/// Calls use(folder, version) for each folder of files that may limit what `controller` ("memory",
/// "cpu") gives to this process: of its group in v2 and in v1's hierarchy of the controller, and of
/// all their parents. `root`: prefix of /proc and /sys, for tests.
template <class Use>
void for_each_cgroup(const std::string& root, std::string_view controller, Use use) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    // NUMBER:CONTROLLERS:PATH; v2 has no controllers there.
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_v2 = controllers.empty();
    if (!is_v2 && !detail::has_word(controllers, controller)) continue;
    const auto mount = is_v2 ? detail::cgroup_mount(root, "cgroup2", "")
                             : detail::cgroup_mount(root, "cgroup", controller);
    if (!mount) continue;
    detail::for_each_parent(root, *mount, line.substr(second + 1), [&](const std::string& folder) {
      use(folder, is_v2 ? CgroupVersion::v2 : CgroupVersion::v1);
    });
  }
}

}  // namespace lockstep::base
