#pragma once

#include <cstddef>
#include <cstring>

namespace lockstep::message {

inline std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }
inline const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }

/// Copies data that stays on its rank; `to` and `from` may be equal.
inline void keep(void* to, const void* from, std::size_t n_bytes) {
  if (n_bytes > 0 && to != from) std::memmove(to, from, n_bytes);
}

}  // namespace lockstep::message
