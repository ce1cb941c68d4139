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

/// Why `peer` can be no peer of `rank`; empty if it can.
inline std::string why_no_peer(std::string_view parameter, int peer, int rank, int n_ranks) {
  if (peer < 0 || peer >= n_ranks) return no_rank_text(parameter, peer, n_ranks);
  if (peer != rank) return {};
  return fmt::format("{} is this rank itself ({}); the peer must be another rank", parameter, peer);
}

}  // namespace lockstep::internal
