#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace lockstep::run {

/// Which world of one start of the ranks each rank belongs to: 0 is the one that they inherit; a
/// rank that has left its world and asks (init_dist after destroy_dist) gets a later one. Ranks
/// that meet need no agreement: they are all sent to the newest world.
///
/// Init ends on all ranks or on none, so in a world that a rank has left either all ranks have
/// been, or they never will be together: nobody is sent there any more.
class Generations {
 public:
  explicit Generations(int n_ranks) : of_rank_(static_cast<std::size_t>(n_ranks), 0) {}

  int of(int rank) const { return of_rank_[static_cast<std::size_t>(rank)]; }
  int newest() const { return std::ranges::max(of_rank_); }
  /// Earlier worlds have no rank any more.
  int oldest() const { return std::ranges::min(of_rank_); }

  /// The world of a rank that asks: the newest, or a new one after it. `has_leaver`: whether a rank
  /// has left the newest.
  int next_of(int rank, bool has_leaver) const {
    return of(rank) == newest() || has_leaver ? newest() + 1 : newest();
  }
  void enter(int rank, int generation) { of_rank_[static_cast<std::size_t>(rank)] = generation; }

 private:
  std::vector<int> of_rank_;
};

}  // namespace lockstep::run
