#pragma once

#include <sys/resource.h>

#include <cstdint>

namespace lockstep::base {

/// Whether a file of that length is longer than RLIMIT_FSIZE allows, which the system would say by
/// SIGXFSZ: files in memory are meant too. Then the error is EFBIG.
inline bool exceeds_file_limit(std::uint64_t n_bytes) noexcept {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
         n_bytes > limit.rlim_cur;
}

}  // namespace lockstep::base
