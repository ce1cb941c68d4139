#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <lockstep/group.hpp>
#include <lockstep/nn/distributed_data_parallel.hpp>
#include <lockstep/nn/sync_batch_norm.hpp>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "nn/ddp/reducer.hpp"
#include "nn/replicas/module_copies.hpp"
#include "nn/replicas/replica_threads.hpp"

namespace lockstep::nn::detail {

/// The shards of a rank: each is a rank of a group of its own, on a thread with a copy of the
/// module and a Reducer. The first is the module itself, on the caller's thread.
///
/// Why the numbers do not depend on the number of ranks: shard s of S computes what rank s of S
/// ranks computes, from the same samples in memory of its own, with as many intra-op threads;
/// every exchange of shards is one of that group, whose reductions add in the order of the tree
/// over S, whichever process holds a member; and the parameters, one memory per rank, change by the
/// same gradients in one optimizer. docs/design/023 has the operands of each sum.
///
/// Copies share the memory of the parameters and are leaves of their own graphs; gradients and
/// buffers are their own. Before a step a copy gets the module's buffers, and its gradients, unless
/// both accumulate (no_sync).
class Shards final : public Synchroniser {
 public:
  Shards(torch::nn::Module& module, const DistributedDataParallelOptions& options,
         std::source_location where);

  std::optional<lockstep::detail::Collective> before_forward(
      const std::optional<std::source_location>& where) override;
  bool wants_outputs() const override { return false; }
  void after_forward(const std::vector<at::Tensor>& /*outputs*/) override {}
  bool wants_shadow() const override { return false; }
  void set_shadow(std::function<at::Tensor()> /*shadow*/) override {}
  void add_no_sync(int n) override;
  void join(const std::function<void()>& body, const JoinOptions& options,
            std::function<at::Tensor()> example, std::source_location where) override;
  double run_shards(const ShardedStep& step, std::source_location where) override;

 private:
  /// What the wrapped module consists of.
  struct Structure {
    std::vector<ModuleCopies::ModulePtr> modules;
    std::size_t n_parameters = 0, n_buffers = 0;
    bool operator==(const Structure&) const = default;
  };
  UsageError usage(std::source_location where, const std::string& text) const;
  torch::nn::Module& module_of(std::size_t i) { return i == 0 ? module_ : *copies_[i - 1]; }
  Structure structure() const;
  /// body(i) for each shard of this rank on its thread, in its group; throws what the first threw.
  void run(const std::function<void(std::size_t)>& body);
  /// Ends the groups of this rank's i-th shard: the others wait for it.
  void abandon(std::size_t i, const std::exception_ptr& error) const noexcept;
  void check_options(const DistributedDataParallelOptions& options,
                     std::source_location where) const;
  void check_n_threads(std::source_location where) const;
  void check_before_step(std::source_location where) const;
  void check_after_step(std::source_location where) const;
  std::string differing_buffer(std::size_t i, std::source_location where);
  void share_gradients(std::source_location where);
  void keep_accumulated();
  void forget_groups_of_layers();
  /// Of each shard of this rank.
  std::vector<std::int64_t> sizes_of_shards(const std::vector<std::int64_t>& n_samples,
                                            std::source_location where);
  double run_one(std::size_t i, const ShardedStep& step, std::source_location where);

  torch::nn::Module& module_;
  const int n_shards_;
  const int n_threads_;  ///< intra-op, of each shard
  const bool is_alone_;  ///< made where there was no world, of an unset group
  const Group group_;    ///< of the ranks
  std::size_t n_mine_ = 0;
  ModuleCopies copies_;
  Structure structure_;
  /// The layers of the module that a step gives a group to, as long as the structure is the same.
  std::vector<std::pair<std::string, NamedLayer*>> layers_;
  std::vector<Group> groups_;                ///< of the shards, as each of mine
  std::unique_ptr<ReplicaThreads> threads_;  ///< of all but the first
  bool runs_ = false;                        ///< run_shards does
  std::vector<std::shared_ptr<Reducer>> reducers_;
  int n_no_sync_ = 0;
  /// The module's gradients as the last step left them, if it was in no_sync.
  std::optional<std::vector<at::Tensor>> accumulated_;
  // Of the step, on this rank; the first and the last on all.
  std::int64_t n_samples_ = 0;
  at::Tensor generator_before_;
  bool has_drawn_ = false;
  std::string changed_parameter_;
  std::string differing_buffer_;
};

}  // namespace lockstep::nn::detail
