#include "train/batches.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>

namespace train {

std::vector<std::size_t> cut(std::size_t n, int n_ranks) {
  const auto ranks = static_cast<std::size_t>(n_ranks);
  std::vector<std::size_t> shares(ranks, n / ranks);
  for (std::size_t r = 0; r < n % ranks; ++r) ++shares[r];
  return shares;
}

std::vector<std::size_t> shares_of(std::size_t batch, int n_ranks,
                                   const std::vector<std::size_t>& wanted) {
  if (wanted.empty() && batch < static_cast<std::size_t>(n_ranks)) {
    throw std::invalid_argument(
        fmt::format("--batch {} over {} ranks: expected at least one sample for each; give a "
                    "larger --batch or fewer ranks",
                    batch, n_ranks));
  }
  if (wanted.empty()) return cut(batch, n_ranks);
  const std::size_t sum = std::accumulate(wanted.begin(), wanted.end(), std::size_t{0});
  if (wanted.size() != static_cast<std::size_t>(n_ranks) || sum != batch ||
      std::find(wanted.begin(), wanted.end(), 0U) != wanted.end()) {
    throw std::invalid_argument(
        fmt::format("--shares {}: expected {} numbers of at least 1, one for each rank, that sum "
                    "to --batch {}",
                    fmt::join(wanted, ","), n_ranks, batch));
  }
  return wanted;
}

std::vector<std::int64_t> epoch_order(std::size_t n, std::uint64_t seed, std::size_t epoch) {
  // std::shuffle and the std distributions differ between standard libraries; seed_seq and the
  // engine do not.
  std::seed_seq words{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                      static_cast<std::uint32_t>(epoch)};
  std::mt19937_64 random(words);
  std::vector<std::int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t left = n; left > 1; --left) std::swap(order[left - 1], order[random() % left]);
  return order;
}

}  // namespace train
