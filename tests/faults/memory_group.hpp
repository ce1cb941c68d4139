#pragma once

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <fstream>
#include <string>

namespace lockstep::test {

/// A control group below this process's own, of the memory controller.
class MemoryGroup {
 public:
  explicit MemoryGroup(std::size_t limit) {
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
      const bool is_v1 = line.find(":memory:") != std::string::npos;
      if (!is_v1 && !line.starts_with("0::")) continue;
      const std::string path = (is_v1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup") +
                               line.substr(line.rfind(':') + 1) +
                               fmt::format("/lockstep-{}-{}", ::getpid(), next_number());
      if (::mkdir(path.c_str(), 0700) != 0) continue;
      path_ = path;
      if (std::ofstream(path + (is_v1 ? "/memory.limit_in_bytes" : "/memory.max"))
          << limit << std::flush) {
        return;
      }
      ::rmdir(path_.c_str());
      path_.clear();
    }
  }
  ~MemoryGroup() {
    if (!path_.empty()) ::rmdir(path_.c_str());
  }
  MemoryGroup(const MemoryGroup&) = delete;
  MemoryGroup& operator=(const MemoryGroup&) = delete;

  explicit operator bool() const { return !path_.empty(); }
  const std::string& path() const { return path_; }
  bool join() const {
    return bool(std::ofstream(path_ + "/cgroup.procs") << ::getpid() << std::flush);
  }

 private:
  static int next_number() {
    static std::atomic<int> number{0};
    return number++;
  }

  std::string path_;
};

}  // namespace lockstep::test
