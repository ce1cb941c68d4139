#include <fmt/format.h>

#include <algorithm>
#include <lockstep/error.hpp>
#include <lockstep/nn/elastic.hpp>

#include "nn/ddp/epoch_order.hpp"
#include "nn/ddp/shard_range.hpp"

namespace lockstep::nn {

ElasticSampler::ElasticSampler(std::size_t n_samples, const ElasticSamplerOptions& options)
    : n_samples_(n_samples), options_(options) {
  if (options.micro_batches == 0) {
    throw UsageError({.operation = "ElasticSampler"}, "micro_batches is 0; expected at least 1");
  }
  if (options.shards < 0) {
    throw UsageError(
        {.operation = "ElasticSampler"},
        fmt::format("{} shards; expected those of DistributedDataParallel, or 0", options.shards));
  }
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

ElasticSampler::Range ElasticSampler::range_of(std::int64_t step) const noexcept {
  const std::size_t first =
      static_cast<std::size_t>(step) % steps_per_epoch() * options_.global_batch;
  return {.first = first, .end = std::min(first + options_.global_batch, n_samples_)};
}

std::size_t ElasticSampler::n_samples(std::int64_t step) const noexcept {
  const Range range = range_of(step);
  return range.end - range.first;
}

std::vector<std::size_t> ElasticSampler::batch(std::int64_t step, const Group& group) const {
  return part_of(step, range_of(step), group);
}

std::vector<std::size_t> ElasticSampler::batch(std::int64_t step, std::size_t micro_batch,
                                               const Group& group) const {
  const std::size_t n_parts = options_.micro_batches;
  if (micro_batch >= n_parts) {
    throw UsageError(
        {.operation = "ElasticSampler::batch"},
        fmt::format("there is no micro-batch {}; micro_batches is {}", micro_batch, n_parts));
  }
  const Range all = range_of(step);
  const auto begin_of = [&](std::size_t part) {
    return all.first + (all.end - all.first) * part / n_parts;
  };
  return part_of(step, {.first = begin_of(micro_batch), .end = begin_of(micro_batch + 1)}, group);
}

std::vector<std::size_t> ElasticSampler::part_of(std::int64_t step, Range range,
                                                 const Group& group) const {
  const std::size_t epoch = epoch_of(step);
  if (epoch_ != epoch) {
    order_ = epoch_order(n_samples_, options_.shuffle, options_.seed, epoch);
    epoch_ = epoch;
  }
  std::vector<std::size_t> mine;
  const int n = options_.shards > 0 ? options_.shards : group.size();
  if (n < group.size()) {
    throw UsageError(
        {.operation = "ElasticSampler::batch"},
        fmt::format("{} shards for {} ranks: expected as many at least", n, group.size()));
  }
  for (const std::size_t shard : shards_of(group.rank(), group.size(), n)) {
    for (std::size_t i = range.first + shard; i < range.end; i += static_cast<std::size_t>(n)) {
      mine.push_back(order_[i]);
    }
  }
  return mine;
}

}  // namespace lockstep::nn
