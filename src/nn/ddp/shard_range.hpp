#pragma once

#include <cstddef>
#include <cstdint>
#include <ranges>

namespace lockstep::nn {

/// Consecutive shards.
struct ShardRange {
  std::size_t first, end_;
  std::size_t size() const noexcept { return end_ - first; }
  auto begin() const { return std::views::iota(first, end_).begin(); }
  auto end() const { return std::views::iota(first, end_).end(); }
};

/// Those of rank r of n_ranks: ranks differ by one shard at most.
inline ShardRange shards_of(int rank, int n_ranks, int n_shards) noexcept {
  const auto r = static_cast<std::size_t>(rank), n = static_cast<std::size_t>(n_ranks);
  const auto all = static_cast<std::size_t>(n_shards);
  return {.first = all * r / n, .end_ = all * (r + 1) / n};
}

/// How many of a step's samples a shard has: positions shard, shard + n_shards, ...
inline std::int64_t size_of_shard(std::size_t shard, std::int64_t n_samples,
                                  int n_shards) noexcept {
  return (n_samples - static_cast<std::int64_t>(shard) + n_shards - 1) / n_shards;
}

}  // namespace lockstep::nn
