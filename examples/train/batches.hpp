#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// Which samples a rank trains on. Every rank computes the same and takes its part, so the union
/// of the ranks' parts is the batch that one rank would have.
namespace train {

/// Samples of each rank: `n` cut as equally as it goes, the first ranks one more.
std::vector<std::size_t> cut(std::size_t n, int n_ranks);

/// The batch's shares by rank: `wanted` where given (--shares), else cut(batch, n_ranks).
/// Throws std::invalid_argument where `wanted` has not n_ranks parts or sums not to batch, or
/// where a rank would get nothing.
std::vector<std::size_t> shares_of(std::size_t batch, int n_ranks,
                                   const std::vector<std::size_t>& wanted);

/// The order of `n` samples in an epoch: a function of its arguments, on every machine alike.
std::vector<std::int64_t> epoch_order(std::size_t n, std::uint64_t seed, std::size_t epoch);

/// `all` cut by `shares`: the rank-th part.
template <class T>
std::span<T> part_of(std::span<T> all, std::span<const std::size_t> shares, int rank) {
  std::size_t first = 0;
  for (int r = 0; r < rank; ++r) first += shares[static_cast<std::size_t>(r)];
  return all.subspan(first, shares[static_cast<std::size_t>(rank)]);
}

}  // namespace train
