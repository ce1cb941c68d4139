#include "base/process.hpp"

#include <fcntl.h>

#include <cstdio>
#include <cstring>

#include "base/fd.hpp"

namespace lockstep::base {
namespace {

struct Stat {
  char state = 'X';
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
  // Fields 3 (state) and 22 (start time).
  const int n_read =
      field == nullptr ? 0
                       : std::sscanf(field + 1,
                                     " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
                                     "%*s %*s %*s %*s %llu",
                                     &stat.state, &start_time);
  if (n_read != 2) return {};
  stat.start_time = start_time;
  return stat;
}

}  // namespace

std::uint64_t process_start_time(pid_t pid) noexcept { return read_stat(pid).start_time; }

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
