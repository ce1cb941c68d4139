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

/// What happens to a data set that the ranks cannot share equally: the first ranks get one sample
/// more (no sample lost or doubled; train in DistributedDataParallel::join), the first samples are
/// taken twice, or the last ones are left out.
enum class UnevenTail { keep, pad, drop };

struct DistributedSamplerOptions {
  bool shuffle = true;     ///< anew in every epoch, in the same order on all ranks
  std::uint64_t seed = 0;  ///< equal on all ranks
  UnevenTail tail = UnevenTail::keep;
  Group group = default_group();  ///< for its rank and size only: nothing is sent
};

/// This rank's share of the indices of a data set, for torch::data::make_data_loader. Rank r has
/// those at r, r + size, r + 2 * size, ... of the epoch's order, which depends on seed and epoch
/// only, on every machine and compiler.
///
/// A data loader resets it at its begin(): every pass is one epoch, starting with 0. Copies share
/// the epoch, so that set_epoch works beside a loader that has a copy.
/// Threads: as a sampler, one at a time.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  explicit DistributedSampler(std::size_t size, const DistributedSamplerOptions& options = {});

  /// The epoch of the next reset.
  void set_epoch(std::size_t epoch) { *next_epoch_ = epoch; }
  /// Samples of this rank in an epoch.
  std::size_t n_samples() const;

  /// Begins the next epoch, of a data set of another size if given.
  void reset(torch::optional<std::size_t> new_size = {}) override;
  torch::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  /// The next epoch and what has been taken of this one.
  void save(torch::serialize::OutputArchive& archive) const override;
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
