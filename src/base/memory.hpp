#pragma once

#include <cstddef>

namespace lockstep::base {

/// Bytes the system could give to programs now, without ending others; a large number where it
/// does not say.
std::size_t available_memory() noexcept;

/// Asks for the line at `at`, for this core alone. Not __builtin_prefetch, which for the least
/// x86-64 fetches a line to read.
inline void prefetch_to_write(const void* at) noexcept {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
  __builtin_prefetch(at, /*rw=*/1);
#endif
}

}  // namespace lockstep::base
