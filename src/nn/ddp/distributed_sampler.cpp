#include <lockstep/nn/distributed_sampler.hpp>

#include <torch/serialize/archive.h>

#include <algorithm>
#include <numeric>
#include <random>

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
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const auto number = [&archive](const char* key) {
    torch::Tensor value = torch::empty({}, torch::kLong);
    archive.read(key, value, /*is_buffer=*/true);
    return static_cast<std::size_t>(value.item<std::int64_t>());
  };
  size_ = number("size");
  begin_epoch(number("epoch"));
  *next_epoch_ = number("next_epoch");
  n_taken_ = number("n_taken");
}

}  // namespace lockstep::nn
