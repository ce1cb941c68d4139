#pragma once

#include <cstddef>

/// All large memory of all ranks overlaps here: its contents are never read, and a simulated
/// cluster has more memory than this machine.
namespace growth {

inline constexpr std::size_t kArenaBytes = std::size_t{1} << 30;
inline constexpr std::size_t kLarge = (std::size_t{1} << 20) - 4096;

/// kArenaBytes of memory; null: not allocated yet.
extern char* arena;

}  // namespace growth
