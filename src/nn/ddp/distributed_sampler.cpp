#include <lockstep/nn/distributed_sampler.hpp>

#include <fmt/format.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <limits>
#include <lockstep/error.hpp>
#include <numeric>
#include <optional>
#include <random>

#include "nn/error.hpp"

namespace lockstep::nn {

DistributedSampler::DistributedSampler(std::size_t size, const DistributedSamplerOptions& options)
    : size_(size), options_(options) {
  begin_epoch(0);
}

std::size_t DistributedSampler::n_samples() const {
  const auto rank = static_cast<std::size_t>(options_.group.rank());
  const auto n_ranks = static_cast<std::size_t>(options_.group.size());
  const std::size_t tail = size_ % n_ranks;
  switch (options_.tail) {
    case UnevenTail::keep: return size_ / n_ranks + (rank < tail ? 1 : 0);
    case UnevenTail::pad: return size_ / n_ranks + (tail > 0 ? 1 : 0);
    case UnevenTail::drop: return size_ / n_ranks;
  }
  return 0;
}

void DistributedSampler::begin_epoch(std::size_t epoch) {
  epoch_ = epoch;
  n_taken_ = 0;
  std::vector<std::size_t> order(size_);
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (options_.shuffle) {
    // Not std::shuffle: its order depends on the standard library. The bias of % is below 2^-32.
    std::seed_seq seeds{options_.seed, options_.seed >> 32U, std::uint64_t{epoch}};
    std::mt19937_64 random(seeds);
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  }
  indices_.resize(n_samples());
  const auto rank = static_cast<std::size_t>(options_.group.rank());
  const auto n_ranks = static_cast<std::size_t>(options_.group.size());
  for (std::size_t i = 0; i < indices_.size(); ++i) {
    indices_[i] = order[(rank + i * n_ranks) % size_];
  }
}

void DistributedSampler::reset(torch::optional<std::size_t> new_size) {
  if (new_size.has_value()) size_ = *new_size;
  begin_epoch((*next_epoch_)++);
}

torch::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  const std::size_t n = std::min(batch_size, indices_.size() - n_taken_);
  if (n == 0) return {};
  const auto begin = indices_.begin() + static_cast<std::ptrdiff_t>(n_taken_);
  n_taken_ += n;
  return std::vector<std::size_t>(begin, begin + static_cast<std::ptrdiff_t>(n));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  const auto number = [](std::size_t value) {
    return torch::tensor(static_cast<std::int64_t>(value), torch::kLong);
  };
  archive.write("size", number(size_), /*is_buffer=*/true);
  archive.write("epoch", number(epoch_), /*is_buffer=*/true);
  archive.write("next_epoch", number(*next_epoch_), /*is_buffer=*/true);
  archive.write("n_taken", number(n_taken_), /*is_buffer=*/true);
  archive.write("n_samples", number(indices_.size()), /*is_buffer=*/true);
  archive.write("n_ranks", number(static_cast<std::size_t>(options_.group.size())),
                /*is_buffer=*/true);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const auto number = [&archive](const char* key, std::optional<std::size_t> missing = {}) {
    torch::Tensor value = torch::empty({}, torch::kLong);
    if (!missing.has_value()) {
      archive.read(key, value, /*is_buffer=*/true);
    } else if (!archive.try_read(key, value, /*is_buffer=*/true)) {
      return *missing;
    }
    return static_cast<std::size_t>(value.item<std::int64_t>());
  };
  const auto own_ranks = static_cast<std::size_t>(options_.group.size());
  const std::size_t size = number("size"), epoch = number("epoch"), n_taken = number("n_taken");
  const std::size_t next_epoch = number("next_epoch");
  // Older archives have neither of these.
  const std::size_t n_ranks = number("n_ranks", own_ranks);
  const std::size_t n_samples = number("n_samples", std::numeric_limits<std::size_t>::max());
  const bool is_same = size == size_ && n_ranks == own_ranks;
  const bool is_over = n_taken >= n_samples;
  if (!is_same && n_taken > 0 && !is_over) {
    throw UsageError(
        context_of("DistributedSampler::load", options_.group, {}),
        fmt::format(
            "the archive is from the middle of an epoch of {} samples on {} ranks, and this "
            "sampler has {} samples on {}: go on with the same, or save between epochs",
            size, n_ranks, size_, own_ranks));
  }
  begin_epoch(epoch);
  *next_epoch_ = next_epoch;
  // The archive may be of another rank, which has one sample more.
  n_taken_ = is_over ? indices_.size() : std::min(n_taken, indices_.size());
}

}  // namespace lockstep::nn
