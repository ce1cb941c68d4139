#pragma once

namespace lockstep::message {

/// Ranks of a channel at equal distances, and this rank's number among them.
struct Subset {
  int first;  ///< the channel's number of rank 0
  int stride;
  int size;
  int rank;

  int number_of(int r) const noexcept { return first + r * stride; }
  int rank_of(int number) const noexcept { return (number - first) / stride; }
};

}  // namespace lockstep::message
