#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::bench {

/// The current relation of the machine's two cores (docs/performance.md).
enum class Placement { siblings, near, far };

/// How often each placement was found in a run, over all its sizes.
class Occurrences {
 public:
  void add(Placement placement) {
    ++counts_.at(static_cast<std::size_t>(placement));
    ++n_all_;
  }
  /// In a tenth of the looks: a placement that is rarer is not waited for.
  bool occurs(Placement placement) const {
    const int n = counts_.at(static_cast<std::size_t>(placement));
    return n > 0 && 10 * n >= n_all_;
  }

 private:
  std::array<int, 3> counts_{};
  int n_all_ = 0;
};

/// Which contestant has the next block of one size, and whether there are enough: each is to have
/// n_blocks in every placement that occurs. Of several settings of one library only the fastest
/// counts, so a setting that is clearly slower in a placement has only kTrialBlocks there.
class Schedule {
 public:
  static constexpr std::size_t kTrialBlocks = 2;
  static constexpr double kClearlySlower = 1.3;

  /// `families` has the library of each contestant.
  Schedule(std::vector<std::string> families, int n_blocks)
      : families_(std::move(families)),
        n_blocks_(static_cast<std::size_t>(n_blocks)),
        has_failed_(families_.size()),
        places_(families_.size()) {}

  /// The contestant that needs a block in this placement and has had the fewest turns there; none
  /// if there are enough.
  std::optional<std::size_t> next(Placement placement) {
    std::optional<std::size_t> best;
    for (std::size_t i = 0; i < families_.size(); ++i) {
      if (!needs(i, placement)) continue;
      if (!best || places_[i][placement].n_turns < places_[*best][placement].n_turns) best = i;
    }
    if (best) ++places_[*best][placement].n_turns;
    return best;
  }

  /// Its block's time per call. A block during which the placement changed is not added.
  void add(std::size_t contestant, Placement placement, double ns) {
    places_[contestant][placement].times.push_back(ns);
  }
  /// It gets no more blocks.
  void fail(std::size_t contestant) { has_failed_[contestant] = true; }
  bool has_failed(std::size_t contestant) const { return has_failed_[contestant]; }

  bool is_done(const Occurrences& found) const {
    for (const Placement placement : {Placement::siblings, Placement::near, Placement::far}) {
      if (!found.occurs(placement)) continue;
      for (std::size_t i = 0; i < families_.size(); ++i) {
        if (needs(i, placement)) return false;
      }
    }
    return true;
  }

 private:
  struct Place {
    int n_turns = 0;
    std::vector<double> times;
  };

  const Place* place_of(std::size_t contestant, Placement placement) const {
    const auto found = places_[contestant].find(placement);
    return found == places_[contestant].end() ? nullptr : &found->second;
  }

  /// None before the trial's end.
  std::optional<double> median_of(std::size_t contestant, Placement placement) const {
    const Place* const place = place_of(contestant, placement);
    if (place == nullptr || place->times.size() < kTrialBlocks) return std::nullopt;
    std::vector<double> times = place->times;
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>((times.size() - 1) / 2);
    std::nth_element(times.begin(), middle, times.end());
    return *middle;
  }

  bool needs(std::size_t contestant, Placement placement) const {
    if (has_failed_[contestant]) return false;
    const Place* const place = place_of(contestant, placement);
    if (place == nullptr) return true;
    if (place->times.size() >= n_blocks_) return false;
    const auto mine = median_of(contestant, placement);
    if (!mine || families_[contestant] == "lockstep") return true;  // ours are no settings
    for (std::size_t i = 0; i < families_.size(); ++i) {
      if (i == contestant || has_failed_[i] || families_[i] != families_[contestant]) continue;
      const auto other = median_of(i, placement);
      if (other && *mine > kClearlySlower * *other) return false;
    }
    return true;
  }

  std::vector<std::string> families_;
  std::size_t n_blocks_;
  std::vector<bool> has_failed_;
  std::vector<std::map<Placement, Place>> places_;
};

}  // namespace lockstep::bench
