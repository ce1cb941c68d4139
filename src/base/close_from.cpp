#include "base/close_from.hpp"

#include <dirent.h>
#include <unistd.h>

#include <charconv>
#include <cstring>

namespace lockstep::base {

void close_from(int first) {
  // close_range needs Linux 5.9, and a sandbox may forbid it.
  if (close_range(static_cast<unsigned>(first), ~0U, 0) == 0) return;
  DIR* const listing = opendir("/proc/self/fd");
  while (const dirent* const entry = listing != nullptr ? readdir(listing) : nullptr) {
    int fd = -1;
    std::from_chars(entry->d_name, entry->d_name + std::strlen(entry->d_name), fd);
    if (fd >= first && fd != dirfd(listing)) close(fd);
  }
  if (listing != nullptr) {
    closedir(listing);
    return;
  }
  const long n_descriptors = sysconf(_SC_OPEN_MAX);
  for (int fd = first; fd < n_descriptors; ++fd) close(fd);
}

}  // namespace lockstep::base
