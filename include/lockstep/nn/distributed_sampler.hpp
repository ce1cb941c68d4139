#pragma once

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/world.hpp>

namespace lockstep::nn {

/// If a data set cannot be divided equally: keep, the default, gives the first ranks one sample
/// more (none lost or repeated; train in DistributedDataParallel::join, or the others wait for
/// their last step until the timeout), pad, PyTorch's default, repeats the first samples, drop
/// omits the last ones.
enum class UnevenTail { keep, pad, drop };

/// Options of DistributedSampler.
struct DistributedSamplerOptions {
  bool shuffle = true;     ///< a new order in every epoch, the same on all ranks
  std::uint64_t seed = 0;  ///< the same on all ranks
  UnevenTail tail = UnevenTail::keep;
  /// Only its rank and size are used: no communication. Unset: default_group() as each epoch
  /// begins.
  std::optional<Group> group{};
  /// Batches that a loader with workers takes before it returns them: its max_jobs, by default
  /// twice its workers. save() leaves them for the rest of the epoch.
  std::size_t n_ahead = 0;
  /// That of DistributedDataParallelOptions::shards. A rank gets the samples of its shards: of each
  /// as many as the loader's batch size, one after the other; that is then a shard's, and
  /// Options::shards times as much that of all ranks. The position in an epoch, saved, is valid for
  /// any number of ranks. 0: each rank is one. A data set that cannot be divided equally needs pad
  /// or drop.
  int shards = 0;
};

/// This rank's share of the indices of a data set, for torch::data::make_data_loader. Rank r gets
/// the indices at positions r, r + size, r + 2 * size, ... of the epoch's order, which depends on
/// seed and epoch only and is the same on every machine and compiler.
///
/// A data loader resets it in begin(): every pass is one epoch, starting with 0. Copies are one
/// sampler: they share epoch and position, so that set_epoch, save and load of the sampler that a
/// loader was given are about the loader's copy. After load the next pass is the rest of the epoch
/// that was saved, which with workers needs DistributedSamplerOptions::n_ahead. Threads: one at a
/// time, for all copies.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  explicit DistributedSampler(std::size_t size, const DistributedSamplerOptions& options = {});
  // Moving copies the handle: a sampler that was moved into a loader can still be saved.
  DistributedSampler(const DistributedSampler&) = default;
  DistributedSampler& operator=(const DistributedSampler&) = default;
  ~DistributedSampler() override = default;

  /// Sets the epoch for the next reset. After load, setting the saved epoch resumes it at the saved
  /// position.
  void set_epoch(std::size_t epoch);
  /// Number of samples of this rank per epoch.
  std::size_t n_samples() const;

  /// Starts the next epoch, with a new size of the data set if given. The first reset after load,
  /// without a size, resumes the saved epoch if that is not complete. UsageError if the group that
  /// was given is a split one of a world that the rank has left.
  void reset(torch::optional<std::size_t> new_size = {}) override;
  /// UsageError if the rank has left the world in which the epoch began: reset, as begin() does.
  torch::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  /// Saves the next epoch and the position in this one. One rank's archive serves all.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Keeps this sampler's size and group. UsageError if the archive is from the middle of an epoch
  /// with another size or number of ranks.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State {
    std::size_t size;
    std::optional<Group> group{};  // as the epoch began
    std::size_t next_epoch = 0;
    std::size_t epoch = 0;
    std::size_t n_taken = 0;
    std::vector<std::size_t> n_before{};  // each call of next in this epoch: n_taken then
    std::vector<std::vector<std::size_t>> indices{};  // of each shard of this rank
    bool is_resumed = false;                          // by load: the next reset resumes
  };

  Group group() const;
  int n_shards() const;
  std::size_t n_samples_of(std::size_t shard) const;
  std::size_t n_longest() const;
  void begin_epoch(std::size_t epoch);
  void resume_in_the_world();
  std::size_t n_returned() const;

  DistributedSamplerOptions options_;
  std::shared_ptr<State> state_;
};

}  // namespace lockstep::nn
