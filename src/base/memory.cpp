#include "base/memory.hpp"

#include <cstdint>
#include <cstdio>

namespace lockstep::base {

std::size_t available_memory() noexcept {
  std::FILE* file = std::fopen("/proc/meminfo", "re");
  if (file == nullptr) return SIZE_MAX;
  char line[128];
  unsigned long long n_kib = 0;
  bool is_found = false;
  while (!is_found && std::fgets(line, sizeof line, file) != nullptr) {
    is_found = std::sscanf(line, "MemAvailable: %llu kB", &n_kib) == 1;
  }
  std::fclose(file);
  return is_found ? static_cast<std::size_t>(n_kib) * 1024 : SIZE_MAX;
}

}  // namespace lockstep::base
