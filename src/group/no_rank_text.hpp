#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::internal {

/// For an argument that is no rank of a group: "src is 5; the group's ranks are 0 to 3".
inline std::string no_rank_text(std::string_view parameter, std::int64_t rank, int n_ranks) {
  return fmt::format("{} is {}; the group's ranks are 0 to {}", parameter, rank, n_ranks - 1);
}

}  // namespace lockstep::internal
