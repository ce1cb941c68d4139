#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <lockstep/detail/collective.hpp>
#include <lockstep/group.hpp>
#include <lockstep/nn/distributed_data_parallel.hpp>
#include <memory>
#include <optional>
#include <source_location>
#include <string_view>
#include <thread>
#include <vector>

#include "nn/ddp/call_site.hpp"
#include "nn/ddp/gradient_buckets.hpp"
#include "nn/ddp/uneven_join.hpp"

namespace lockstep::nn::detail {

/// For a Reducer that is of a shard: see Shards, which it must not outlive.
struct OfShard {
  GradientBuckets::Values values = GradientBuckets::Values::own;
  const bool* runs = nullptr;  ///< whether run_shards does
};

/// Averages gradients in buckets while backward runs.
///
/// One backward: the first hook starts a step and queues finish() for the end of backward. Each
/// hook moves its gradient into the bucket. A complete bucket is sent after all earlier ones; the
/// order is the same on all ranks. finish() sends the rest and waits for all of them. The first
/// finish() then rebuilds the buckets in the order in which rank 0's gradients arrived.
///
/// With a communication hook, the flags are sent separately: a hook may change values arbitrarily.
class Reducer final : public Synchroniser, public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(torch::nn::Module& module, const DistributedDataParallelOptions& options,
          std::source_location where, OfShard shard = {});

  std::optional<lockstep::detail::Collective> before_forward(
      const std::optional<std::source_location>& where) override;
  /// Of a forward within no_sync().
  bool wants_outputs() const override { return forward_ != Forward::synchronised; }
  void after_forward(const std::vector<at::Tensor>& outputs) override;
  bool wants_shadow() const override { return join_.has_value() || !shadow_; }
  void set_shadow(std::function<at::Tensor()> shadow) override { shadow_ = std::move(shadow); }
  void add_no_sync(int n) override { n_no_sync_ += n; }
  double run_shards(const ShardedStep& step, std::source_location where) override;
  /// Ends the group of the gradients: the other ranks get PeerFailed.
  void abandon(std::string_view reason) const noexcept { site_.group.abandon(reason); }
  void join(const std::function<void()>& body, const JoinOptions& options,
            std::function<at::Tensor()> example, std::source_location where) override;

 private:
  /// The last forward. synchronised: its backward averages gradients. local: it was in no_sync().
  /// local_marked: the same, and hooks on its outputs set local_backward_ when backward begins.
  enum class Forward { synchronised, local, local_marked };
  /// idle: between steps. prepared: a synchronised forward has checked the parameters.
  /// reducing: between the first hook of a backward and the end of finish().
  enum class Phase { idle, prepared, reducing };
  using Parameter = GradientBuckets::Parameter;
  using Bucket = GradientBuckets::Bucket;
  using Hint = CallSite::Hint;
  using NextStep = UnevenJoin::NextStep;

  /// Throws UsageError if this object was made in an earlier world, or before the world.
  void check_world() const;
  ErrorContext context() const { return site_.context(); }
  void on_gradient(std::size_t index);
  void prepare();
  /// If the last backward ended with an exception: throws, or resets the step in a group of one.
  void check_last_step();
  void check_in_sync();
  bool synchronises() const {
    return forward_ == Forward::synchronised ||
           (forward_ == Forward::local_marked && local_backward_.expired());
  }
  /// Runs the other ranks' next step with an empty batch.
  void shadow_step(const UnevenJoin::Announcement& others,
                   const std::function<at::Tensor()>& example);
  void drop_gradients();
  void start_step();
  /// Collective, if some rank has a gradient.
  void average_sparse(Parameter& parameter);
  void check_same_gradients();
  void send_complete_buckets();
  void finish();

  torch::nn::Module& module_;  // owned by DistributedDataParallel, the only caller
  const DistributedDataParallelOptions options_;
  std::vector<std::int64_t> ready_order_;  // of gradients, in the step
  std::size_t n_sent_ = 0;
  Forward forward_ = Forward::synchronised;
  std::weak_ptr<void> local_backward_;  // not expired: a local backward is running
  Phase phase_ = Phase::idle;
  int n_no_sync_ = 0;                   // guards alive
  std::function<at::Tensor()> shadow_;  // a forward of no samples, like the last one
  std::optional<UnevenJoin> join_;      // while it runs
  int n_checks_ = 0;  // synchronised backwards left that compare the parameters, after uneven data
  std::uint64_t n_steps_ = 0;
  const bool checks_fully_;
  const bool* const shard_runs_;
  std::thread::id shard_thread_;  // of the forward
  const bool is_alone_;           // made where there was no world, of an unset group
  const std::source_location made_at_;
  GradientBuckets gradients_;
  CallSite site_;  // after the buckets: its group is destroyed first, together with its worker
};

}  // namespace lockstep::nn::detail
