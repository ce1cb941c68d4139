#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace lockstep::run {

/// The number of the world that each rank is in, since the ranks were started: all inherit world 0;
/// a rank that calls init_dist after destroy_dist gets a later one. The ranks need not agree on its
/// number: the launcher assigns the newest world.
///
/// init_dist succeeds on all ranks or on none. So a world that a rank has left either was complete
/// or never will be, and the launcher assigns it to no further rank.
class Generations {
 public:
  explicit Generations(int n_ranks) : of_rank_(static_cast<std::size_t>(n_ranks), 0) {}

  int of(int rank) const { return of_rank_[static_cast<std::size_t>(rank)]; }
  int newest() const { return std::ranges::max(of_rank_); }
  /// No rank is in an earlier world.
  int oldest() const { return std::ranges::min(of_rank_); }

  /// The world of a rank that asks: the newest, or a new one after it. `has_rank_left`: whether a
  /// rank has left the newest.
  int next_of(int rank, bool has_rank_left) const {
    return of(rank) == newest() || has_rank_left ? newest() + 1 : newest();
  }
  void enter(int rank, int generation) { of_rank_[static_cast<std::size_t>(rank)] = generation; }

 private:
  std::vector<int> of_rank_;
};

}  // namespace lockstep::run
