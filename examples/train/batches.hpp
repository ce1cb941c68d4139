#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// Which samples a rank trains on. Every rank computes the same order and takes its part, so the
/// union of the ranks' parts is the batch of a single-rank run.
namespace train {

/// Samples per rank: `n` divided as equally as possible, the first ranks get one more.
std::vector<std::size_t> cut(std::size_t n, int n_ranks);

/// Number of samples of a batch per rank: `wanted` if given (--shares), else cut(batch, n_ranks).
/// Throws std::invalid_argument if `wanted` does not have n_ranks entries or their sum is not
/// batch, or if a rank would get no samples.
std::vector<std::size_t> shares_of(std::size_t batch, int n_ranks,
                                   const std::vector<std::size_t>& wanted);

/// The order of `n` samples in an epoch: a function of its arguments, the same on every machine.
std::vector<std::int64_t> epoch_order(std::size_t n, std::uint64_t seed, std::size_t epoch);

/// Part `rank` of `all`, divided by `shares`.
template <class T>
std::span<T> part_of(std::span<T> all, std::span<const std::size_t> shares, int rank) {
  std::size_t first = 0;
  for (int r = 0; r < rank; ++r) first += shares[static_cast<std::size_t>(r)];
  return all.subspan(first, shares[static_cast<std::size_t>(rank)]);
}

}  // namespace train
