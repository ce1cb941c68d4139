#pragma once

#include <cstddef>
#include <cstring>

namespace lockstep::base {

inline std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }
inline const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }

/// `to` and `from` may be equal, and null if n_bytes is 0; they do not overlap otherwise.
inline void copy_bytes(void* to, const void* from, std::size_t n_bytes) {
  if (n_bytes > 0 && to != from) std::memcpy(to, from, n_bytes);
}

}  // namespace lockstep::base
