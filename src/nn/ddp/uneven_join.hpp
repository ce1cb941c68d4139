#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <lockstep/group.hpp>
#include <lockstep/nn/distributed_data_parallel.hpp>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "nn/ddp/call_site.hpp"

namespace lockstep::nn::detail {

/// A running join(). Every forward in it begins with an all_gather of each rank's next action. A
/// rank out of data announces that and shadows the others with an empty batch until all ranks are
/// out of data.
class UnevenJoin {
 public:
  /// What a rank does next.
  enum class NextStep : std::int64_t { joined = 0, accumulate = 1, synchronise = 2 };
  struct Announcement {
    NextStep step = NextStep::joined;
    std::uint64_t scope = 0;  // of the SyncBatchNormScope around its forward; 0: none
    std::int64_t scope_size = 0;
    std::int64_t is_training = 0;  // the module, not those in it
  };

  /// module_group: as DistributedDataParallel was given it. Throws UsageError for optimizers that
  /// join does not support.
  UnevenJoin(torch::nn::Module& module, const Group& module_group, const CallSite& site,
             const JoinOptions& options);

  /// Collective. Returns the next action of the ranks that have data.
  Announcement announce(NextStep step);
  /// The other ranks' next step, with an empty batch. forward: of one.
  void shadow(const Announcement& others, const std::function<at::Tensor()>& forward);
  /// From a rank that had data longest, to all. Collective, when no rank has data.
  void broadcast_state();

  /// Whether the backward that runs is shadow()'s.
  bool is_shadowing() const { return is_shadowing_; }
  /// Ranks that have data.
  int n_active() const { return n_active_; }
  /// The lowest of them, as last announced.
  int last_active() const { return last_active_; }
  /// Whether some rank had no data before another.
  bool was_uneven() const { return was_uneven_; }
  /// Whether every rank throws the UsageError that ends it.
  bool all_throw() const { return all_throw_; }

 private:
  void check_scopes(std::span<const Announcement> all);
  /// The group of the scope that the peers are in.
  Group scope_of(std::uint64_t announced) const;

  torch::nn::Module& module_;
  const Group& module_group_;
  const CallSite& site_;
  const JoinOptions& options_;
  bool is_shadowing_ = false;
  int n_active_ = 0;
  int last_active_ = -1;
  bool was_uneven_ = false;
  bool all_throw_ = false;
  std::optional<Group> scope_;  // around the last forward
  /// Of each module, whether it was in training mode in that forward.
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;
};

}  // namespace lockstep::nn::detail
