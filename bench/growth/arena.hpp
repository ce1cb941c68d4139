#pragma once

#include <cstddef>

/// Where all large memory of all ranks lies, one over the other: nobody looks at what is in it, and
/// a simulated cluster has more than this machine.
namespace growth {

inline constexpr std::size_t kArenaBytes = std::size_t{1} << 30;
inline constexpr std::size_t kLarge = (std::size_t{1} << 20) - 4096;

/// Memory of kArenaBytes; null: none yet.
extern char* arena;

}  // namespace growth
