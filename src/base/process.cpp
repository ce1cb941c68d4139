#include "base/process.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "base/fd.hpp"

namespace lockstep::base {
namespace {

struct Stat {
  char state = 'X';
  std::uint64_t n_cpu_ticks = 0;
  std::uint64_t n_resident_pages = 0;
  std::uint64_t start_time = 0;
};

Stat read_stat(pid_t pid) noexcept {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%d/stat", static_cast<int>(pid));
  const UniqueFd file(::open(path, O_RDONLY | O_CLOEXEC));
  char text[1024];
  const ssize_t n = file ? ::read(file.get(), text, sizeof text - 1) : -1;
  if (n <= 0) return {};
  text[n] = '\0';
  // The second field is the program's name in parentheses, and may hold any character.
  const char* field = std::strrchr(text, ')');
  Stat stat;
  unsigned long long start_time = 0;
  unsigned long long user = 0;
  unsigned long long system = 0;
  unsigned long long n_pages = 0;
  // Fields 3 (state), 14 and 15 (processor time), 22 (start time), 24 (resident pages).
  const int n_read =
      field == nullptr
          ? 0
          : std::sscanf(field + 1,
                        " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu %llu %*s %*s "
                        "%*s %*s %*s %*s %llu %*s %llu",
                        &stat.state, &user, &system, &start_time, &n_pages);
  if (n_read != 5) return {};
  stat.n_cpu_ticks = user + system;
  stat.n_resident_pages = n_pages;
  stat.start_time = start_time;
  return stat;
}

}  // namespace

std::uint64_t process_start_time(pid_t pid) noexcept { return read_stat(pid).start_time; }

ProcessUse process_use(pid_t pid) noexcept {
  if (pid <= 0) return {};
  const Stat stat = read_stat(pid);
  return {
      .cpu_s = static_cast<double>(stat.n_cpu_ticks) / static_cast<double>(::sysconf(_SC_CLK_TCK)),
      .memory_bytes = stat.n_resident_pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))};
}

ProcessState process_state(pid_t pid, std::uint64_t start_time) noexcept {
  const Stat stat = read_stat(pid);
  if (stat.start_time != start_time) return ProcessState::dead;
  switch (stat.state) {
    case 'Z':
    case 'X':
    case 'x': return ProcessState::dead;
    case 'T':
    case 't': return ProcessState::stopped;
    case 'R': return ProcessState::running;
    default: return ProcessState::sleeping;
  }
}

}  // namespace lockstep::base
