#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "run/rank_layout.hpp"

namespace lockstep::run {

/// What the ranks of all nodes have told each other, by world: those that a process joins one after
/// another have the numbers 0, 1 and so on.
class RankAddresses {
 public:
  explicit RankAddresses(int n_ranks) : n_ranks_(static_cast<std::size_t>(n_ranks)) {}

  /// Empty: the rank does not wait for the others any more. Of no rank of the job, or of more
  /// worlds than ranks join at a time: ignored.
  void add(RankAddress address) {
    if (address.rank < 0 || static_cast<std::size_t>(address.rank) >= n_ranks_) return;
    if (!worlds_.contains(address.world) && worlds_.size() >= kMostWorlds) return;
    World& world = worlds_[address.world];
    world.by_rank.resize(n_ranks_);
    std::string& of_rank = world.by_rank[static_cast<std::size_t>(address.rank)];
    if (of_rank.empty() != address.bytes.empty()) world.n_known += of_rank.empty() ? 1 : -1;
    of_rank = std::move(address.bytes);
  }
  bool are_known(std::uint64_t world) const {
    const auto found = worlds_.find(world);
    return found != worlds_.end() && found->second.n_known == static_cast<int>(n_ranks_);
  }
  const std::vector<std::string>& of(std::uint64_t world) const {
    return worlds_.at(world).by_rank;
  }
  std::vector<int> missing(std::uint64_t world) const {
    const auto found = worlds_.find(world);
    std::vector<int> ranks;
    for (std::size_t r = 0; r < n_ranks_; ++r) {
      if (found == worlds_.end() || found->second.by_rank[r].empty()) {
        ranks.push_back(static_cast<int>(r));
      }
    }
    return ranks;
  }
  /// Those before it are not asked for any more.
  void forget_before(std::uint64_t world) {
    worlds_.erase(worlds_.begin(), worlds_.lower_bound(world));
  }

 private:
  static constexpr std::size_t kMostWorlds = 16;
  struct World {
    std::vector<std::string> by_rank;
    int n_known = 0;
  };
  std::size_t n_ranks_;
  std::map<std::uint64_t, World> worlds_;
};

}  // namespace lockstep::run
