#include <fmt/format.h>

#include <algorithm>
#include <lockstep/error.hpp>
#include <lockstep/nn/elastic.hpp>

#include "nn/ddp/epoch_order.hpp"

namespace lockstep::nn {

ElasticSampler::ElasticSampler(std::size_t n_samples, const ElasticSamplerOptions& options)
    : n_samples_(n_samples), options_(options) {
  if (options.global_batch > 0 && steps_per_epoch() > 0) return;
  throw UsageError(
      {.operation = "ElasticSampler"},
      fmt::format("{} samples in batches of {}{} make no step; global_batch is the "
                  "number of samples of a step on all ranks together",
                  n_samples, options.global_batch, options.drop_last ? ", without the last" : ""));
}

std::size_t ElasticSampler::steps_per_epoch() const noexcept {
  const std::size_t batch = options_.global_batch;
  return options_.drop_last ? n_samples_ / batch : (n_samples_ + batch - 1) / batch;
}

std::size_t ElasticSampler::epoch_of(std::int64_t step) const noexcept {
  return static_cast<std::size_t>(step) / steps_per_epoch();
}

std::vector<std::size_t> ElasticSampler::batch(std::int64_t step, const Group& group) const {
  const std::size_t epoch = epoch_of(step);
  if (epoch_ != epoch) {
    order_ = epoch_order(n_samples_, options_.shuffle, options_.seed, epoch);
    epoch_ = epoch;
  }
  const std::size_t first =
      static_cast<std::size_t>(step) % steps_per_epoch() * options_.global_batch;
  const std::size_t end = std::min(first + options_.global_batch, n_samples_);
  std::vector<std::size_t> mine;
  for (std::size_t i = first + static_cast<std::size_t>(group.rank()); i < end;
       i += static_cast<std::size_t>(group.size())) {
    mine.push_back(order_[i]);
  }
  return mine;
}

}  // namespace lockstep::nn
