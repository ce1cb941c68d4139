#pragma once

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>

namespace lockstep::nn {

/// If a data set cannot be divided equally: keep gives the first ranks one sample more (none lost
/// or repeated; train in DistributedDataParallel::join), pad repeats the first samples, drop omits
/// the last ones.
enum class UnevenTail { keep, pad, drop };

/// Of DistributedSampler.
struct DistributedSamplerOptions {
  bool shuffle = true;     ///< a new order in every epoch, the same on all ranks
  std::uint64_t seed = 0;  ///< the same on all ranks
  UnevenTail tail = UnevenTail::keep;
  Group group = default_group();  ///< only its rank and size are used: no communication
};

/// This rank's share of the indices of a data set, for torch::data::make_data_loader. Rank r gets
/// the indices at positions r, r + size, r + 2 * size, ... of the epoch's order, which depends on
/// seed and epoch only and is the same on every machine and compiler.
///
/// A data loader resets it in begin(): every pass is one epoch, starting with 0. Copies share the
/// epoch, so set_epoch also affects the copy in a loader.
/// Threads: one at a time.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  explicit DistributedSampler(std::size_t size, const DistributedSamplerOptions& options = {});

  /// Sets the epoch for the next reset.
  void set_epoch(std::size_t epoch) { *next_epoch_ = epoch; }
  /// Number of samples of this rank per epoch.
  std::size_t n_samples() const;

  /// Starts the next epoch, with a new size of the data set if given.
  void reset(torch::optional<std::size_t> new_size = {}) override;
  torch::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  /// Saves the next epoch and the position in this one. One rank's archive serves all.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Keeps this sampler's size and group. UsageError if the archive is from the middle of an epoch
  /// with another size or number of ranks.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void begin_epoch(std::size_t epoch);

  std::size_t size_;
  DistributedSamplerOptions options_;
  std::shared_ptr<std::size_t> next_epoch_ = std::make_shared<std::size_t>(0);
  std::size_t epoch_ = 0;
  std::size_t n_taken_ = 0;
  std::vector<std::size_t> indices_;  // of this rank
};

}  // namespace lockstep::nn
