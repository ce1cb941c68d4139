#pragma once

#include <sys/resource.h>

#include <cstdint>

namespace lockstep::base {

/// Whether a file of that length exceeds RLIMIT_FSIZE, which also applies to files in memory. The
/// system would raise SIGXFSZ; callers report EFBIG instead.
inline bool exceeds_file_limit(std::uint64_t n_bytes) noexcept {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
         n_bytes > limit.rlim_cur;
}

}  // namespace lockstep::base
