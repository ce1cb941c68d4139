#include <lockstep/nn/distributed_sampler.hpp>

#include <fmt/format.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <limits>
#include <lockstep/error.hpp>
#include <optional>
#include <utility>

#include "nn/ddp/epoch_order.hpp"
#include "nn/ddp/shard_range.hpp"
#include "nn/error.hpp"
#include "world/session.hpp"

namespace lockstep::nn {
namespace {

constexpr const char* kSampler = "DistributedSampler";

}  // namespace

DistributedSampler::DistributedSampler(std::size_t size, const DistributedSamplerOptions& options)
    : options_(options), state_(std::make_shared<State>(State{.size = size})) {
  begin_epoch(0);
}

/// Unset: that of the last epoch while its world lasts, because a helper thread may ask.
Group DistributedSampler::group() const {
  if (options_.group) {
    return internal::follow_world(*options_.group, context_of(kSampler, *options_.group, {}));
  }
  const std::optional<Group>& last = state_->group;
  const bool is_kept =
      last && !internal::has_left(*last) && (last->size() > 1 || !is_distributed());
  return is_kept ? *last : default_group();
}

int DistributedSampler::n_shards() const {
  return options_.shards > 0 ? options_.shards : group().size();
}

std::size_t DistributedSampler::n_samples_of(std::size_t shard) const {
  const auto n = static_cast<std::size_t>(n_shards());
  const std::size_t size = state_->size;
  const std::size_t tail = size % n;
  switch (options_.tail) {
    case UnevenTail::keep: return size / n + (shard < tail ? 1 : 0);
    case UnevenTail::pad: return size / n + (tail > 0 ? 1 : 0);
    case UnevenTail::drop: return size / n;
  }
  return 0;
}

std::size_t DistributedSampler::n_samples() const {
  const Group now = group();
  std::size_t n = 0;
  for (const std::size_t shard : shards_of(now.rank(), now.size(), n_shards())) {
    n += n_samples_of(shard);
  }
  return n;
}

/// Samples of the rank's first shard: no other has more.
std::size_t DistributedSampler::n_longest() const {
  return state_->indices.empty() ? 0 : state_->indices.front().size();
}

void DistributedSampler::begin_epoch(std::size_t epoch) {
  State& state = *state_;
  const Group now = group();
  const int n = n_shards();
  const auto stride = static_cast<std::size_t>(n);
  if (n < now.size() || options_.shards < 0 ||
      (options_.shards > 0 && options_.tail == UnevenTail::keep && state.size % stride != 0)) {
    throw UsageError(context_of(kSampler, now, {}),
                     fmt::format("cannot divide {} samples into {} shards for {} ranks: as many "
                                 "shards as ranks at least, and UnevenTail::pad or drop where a "
                                 "shard would have a sample more",
                                 state.size, options_.shards, now.size()));
  }
  state.group = now;
  state.epoch = epoch;
  state.n_taken = 0;
  state.n_before.clear();
  state.is_resumed = false;
  const auto order = epoch_order(state.size, options_.shuffle, options_.seed, epoch);
  state.indices.clear();
  for (const std::size_t shard : shards_of(state.group->rank(), state.group->size(), n)) {
    auto& mine = state.indices.emplace_back(n_samples_of(shard));
    for (std::size_t i = 0; i < mine.size(); ++i) {
      mine[i] = order[(shard + i * stride) % state.size];
    }
  }
}

void DistributedSampler::set_epoch(std::size_t epoch) {
  if (state_->is_resumed && epoch == state_->epoch) return;
  state_->next_epoch = epoch;
  state_->is_resumed = false;
}

void DistributedSampler::reset(torch::optional<std::size_t> new_size) {
  if (new_size.has_value()) {
    state_->size = *new_size;
    state_->is_resumed = false;
  }
  if (state_->is_resumed) resume_in_the_world();
  if (std::exchange(state_->is_resumed, false)) return;
  begin_epoch(state_->next_epoch++);
}

/// The epoch that was loaded may have been so before the world that the rank is in now.
void DistributedSampler::resume_in_the_world() {
  State& state = *state_;
  const Group before = *state.group, now = group();
  if (!internal::has_left(before) && before.size() == now.size()) return;
  const std::size_t n_taken = state.n_taken;
  if (options_.shards == 0 && before.size() != now.size() && n_taken > 0) {
    throw UsageError(
        context_of("DistributedSampler::reset", now, {}),
        fmt::format(
            "the epoch was loaded in the middle, on {} ranks, and there are {} now: load in "
            "the world in which it goes on",
            before.size(), now.size()));
  }
  begin_epoch(state.epoch);
  state.n_taken = std::min(n_taken, n_longest());
  state.is_resumed = true;
}

torch::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  State& state = *state_;
  internal::check_not_left(*state.group, context_of(kSampler, *state.group, {}));
  const std::size_t n = std::min(batch_size, n_longest() - state.n_taken);
  state.n_before.push_back(state.n_taken);
  if (n == 0) return {};
  std::vector<std::size_t> batch;
  for (const auto& mine : state.indices) {
    const auto begin = mine.begin() + static_cast<std::ptrdiff_t>(state.n_taken);
    batch.insert(batch.end(), begin, begin + static_cast<std::ptrdiff_t>(n));
  }
  state.n_taken += n;
  state.is_resumed = false;
  return batch;
}

/// How many samples a loader has returned. One that takes batches ahead calls next as often when
/// the epoch begins, until there is none, and then once for each batch that it returns.
std::size_t DistributedSampler::n_returned() const {
  const auto& calls = state_->n_before;
  const auto last = std::find(calls.begin(), calls.end(), n_longest());
  const auto n_first = static_cast<std::size_t>(last - calls.begin()) + 1;
  const std::size_t n_ahead = std::min(options_.n_ahead, n_first);
  if (n_ahead == 0 || calls.empty()) return state_->n_taken;
  return calls[calls.size() - std::min(n_ahead, calls.size())];
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  const auto number = [](std::size_t value) {
    return torch::tensor(static_cast<std::int64_t>(value), torch::kLong);
  };
  archive.write("size", number(state_->size), /*is_buffer=*/true);
  archive.write("epoch", number(state_->epoch), /*is_buffer=*/true);
  archive.write("next_epoch", number(state_->next_epoch), /*is_buffer=*/true);
  archive.write("n_taken", number(n_returned()), /*is_buffer=*/true);
  archive.write("n_samples", number(n_longest()), /*is_buffer=*/true);
  archive.write("n_ranks",
                number(static_cast<std::size_t>(options_.shards > 0 ? options_.shards
                                                                    : state_->group->size())),
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
  const auto own_ranks = static_cast<std::size_t>(n_shards());
  const std::size_t size = number("size"), epoch = number("epoch"), n_taken = number("n_taken");
  const std::size_t next_epoch = number("next_epoch");
  // Older archives have neither of these.
  const std::size_t n_ranks = number("n_ranks", own_ranks);
  const std::size_t n_samples = number("n_samples", std::numeric_limits<std::size_t>::max());
  const bool is_same = size == state_->size && n_ranks == own_ranks;
  const bool is_over = n_taken >= n_samples;
  if (!is_same && n_taken > 0 && !is_over) {
    throw UsageError(
        context_of("DistributedSampler::load", group(), {}),
        fmt::format("the archive is from the middle of an epoch of {} samples on {} {}, and this "
                    "sampler has {} samples on {}: resume with the same, or save between epochs",
                    size, n_ranks, options_.shards > 0 ? "shards" : "ranks", state_->size,
                    own_ranks));
  }
  begin_epoch(epoch);
  state_->next_epoch = next_epoch;
  // The archive may be of another rank, which has one sample more.
  const std::size_t n_own = n_longest();
  state_->n_taken = is_over ? n_own : std::min(n_taken, n_own);
  state_->is_resumed = !is_over && (n_taken > 0 || next_epoch == epoch + 1);
}

}  // namespace lockstep::nn
