#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace lockstep::nn {

/// The order of an epoch's samples: a function of the seed and the epoch, the same on every machine
/// and compiler.
inline std::vector<std::size_t> epoch_order(std::size_t n_samples, bool shuffle, std::uint64_t seed,
                                            std::size_t epoch) {
  std::vector<std::size_t> order(n_samples);
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (!shuffle) return order;
  // Not std::shuffle: its order depends on the standard library. The bias of % is below 2^-32.
  std::seed_seq seeds{seed, seed >> 32U, std::uint64_t{epoch}};
  std::mt19937_64 random(seeds);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  return order;
}

}  // namespace lockstep::nn
