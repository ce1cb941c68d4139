#pragma once

#include <c10/core/Storage.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <array>
#include <cstdint>
#include <functional>
#include <lockstep/detail/collective.hpp>
#include <lockstep/group.hpp>
#include <lockstep/nn/distributed_data_parallel.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::nn::detail {

/// Averages gradients in buckets while backward runs.
///
/// A bucket holds the gradients of some parameters of one type and, after them, two flags per
/// parameter: 1 and 0 if this rank has a gradient, 0 and 1 if not. The mean that reduces the bucket
/// leaves a flag above zero exactly if some rank set it, whatever the rounding of the type; no
/// second message is needed to find out which parameters have gradients.
///
/// One backward: the first hook starts a step and queues finish() for the end of backward. Each
/// hook moves its gradient into the bucket. A complete bucket is sent after all earlier ones; the
/// order is the same on all ranks. finish() sends the rest and waits for all of them. The first
/// finish() then rebuilds the buckets in the order in which rank 0's gradients arrived.
///
/// With a communication hook, the flags are sent separately: a hook may change values arbitrarily.
///
/// A parameter can lose its gradient accumulator and with it the hook: set_data with a tensor of
/// another type, torch::load and Module::to do that. A synchronised forward checks for such changes
/// and rebuilds the parameter list; hooks on the tensors themselves, which nothing removes, reject
/// a gradient that arrives before that.
///
/// A rank that rebuilds its list first enters a barrier in every group that its peers may use next:
/// if their parameters have not changed, one of these groups detects the mismatch.
///
/// join: every forward in it begins with an all_gather of each rank's next action. A rank out of
/// data announces that and mirrors the others with an empty batch until all ranks are out of data.
///
/// reducer.cpp has the steps, reducer_setup.cpp the setup, reducer_join.cpp join.
class Reducer final : public Synchroniser, public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(torch::nn::Module& module, const DistributedDataParallelOptions& options,
          std::source_location where);
  ~Reducer() override;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  std::optional<lockstep::detail::Collective> before_forward(
      const std::optional<std::source_location>& where) override;
  /// Of a forward within no_sync().
  bool wants_outputs() const override { return forward_ != Forward::synchronised; }
  void after_forward(const std::vector<at::Tensor>& outputs) override;
  bool wants_shadow() const override { return join_.has_value() || !shadow_; }
  void set_shadow(std::function<at::Tensor()> shadow) override { shadow_ = std::move(shadow); }
  void add_no_sync(int n) override { n_no_sync_ += n; }
  void join(const std::function<void()>& body, const JoinOptions& options,
            std::function<at::Tensor()> example, std::source_location where) override;
  void on_gradient(std::size_t index);

 private:
  // libtorch itself keeps a weak reference. The pointer type depends on its version.
  using Accumulator =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    c10::Storage storage;  // held, so that its address is not reused
    Accumulator accumulator;
    std::uintptr_t hook = 0;
    at::Tensor slice;  // its gradient in the bucket
    std::size_t bucket = 0;
    bool ready = false;
    bool has_gradient = false;     // in the step, on this rank
    bool has_accumulated = false;  // some backward since the last averaging gave it a gradient
    bool used = true;              // static graph: false if it got no gradient in the first step
    // Its gradients are sparse: no bytes in the bucket, and a slice without memory of its own.
    bool is_sparse = false;
    // Means of the flags over the ranks, rounded by the bucket's type: above zero if any rank set
    // one.
    double frac_with_grad = 0, frac_without_grad = 0;
  };
  /// The hook of a tensor of the module.
  struct ParameterHook {
    at::Tensor tensor;
    unsigned position = 0;
  };
  struct Bucket {
    at::ScalarType type = at::kFloat;  // also complex; flags and `gradients` are of its parts
    std::vector<std::size_t> parameters;
    SharedBuffer memory;
    Elements gradients, flags;
    at::Tensor flag_values;  // two flags per parameter: has a gradient, has none
    std::size_t n_pending = 0;
    Work work;
    std::function<void()> complete;  // returned by the communication hook
  };
  /// What errors add. join: a TimeoutError asks whether the ranks have different numbers of
  /// batches; body: a TimeoutError and a MismatchError say that body must not communicate.
  enum class Hint { none, join, body };
  /// What a rank does next, in join.
  enum class NextStep : std::int64_t { joined = 0, accumulate = 1, synchronise = 2 };
  struct Announcement {
    NextStep step = NextStep::joined;
    std::uint64_t scope = 0;  // of the SyncBatchNormScope around its forward; 0: none
    std::int64_t scope_size = 0;
    std::int64_t is_training = 0;  // the module, not those in it
  };
  /// The last forward. synchronised: its backward averages gradients. local: it was in no_sync().
  /// local_marked: the same, and hooks on its outputs set local_backward_ when backward begins.
  enum class Forward { synchronised, local, local_marked };
  /// idle: between steps. prepared: a synchronised forward has checked the parameters.
  /// reducing: between the first hook of a backward and the end of finish().
  enum class Phase { idle, prepared, reducing };
  /// State of a running join().
  struct Join {
    std::function<at::Tensor()> example;  // a forward of no samples
    bool mirrors = false;                 // this rank mirrors the peers' backward
    int n_active = 0;                     // ranks that have data
    int last_active = -1;                 // the lowest such rank, as last announced
    bool was_uneven = false;
    bool all_throw = false;      // every rank throws the UsageError that ends it
    std::optional<Group> scope;  // around the last forward
    /// Of each module, whether it was in training mode in that forward.
    std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes;
  };

  ErrorContext context() const;
  /// Throws UsageError if this object was made in an earlier world, or before the world.
  void check_world() const;
  /// Calls f; adds `what` and `hint` to the error of a collective, once.
  template <class F>
  void explain(const std::function<std::string()>& what, const F& f, Hint hint = Hint::none) const;
  std::string names_of(const Bucket& bucket) const;

  /// The name of the first parameter whose hook or bucket is no longer valid, or "".
  std::string changed_parameter() const;
  void check_before_step() const;
  void check_attached(const Parameter& parameter) const;
  [[noreturn]] void throw_parameter_changed(const std::string& name) const;
  /// The groups in which a forward may communicate before backward uses this object's group.
  std::vector<Group> groups_of_forward() const;
  /// MismatchError if only some ranks call it.
  void barrier_before_rebuild() const;
  /// Collective: compares the modules and broadcasts rank 0's values of new parameters.
  void register_parameters();
  void add_buckets(std::span<const std::int64_t> order);
  void rebuild_buckets();
  void add_hooks();
  void remove_hooks();
  void prepare();
  /// If the last backward ended with an exception: throws, or resets the step in a group of one.
  void check_last_step();
  void check_in_sync();
  bool synchronises() const {
    return forward_ == Forward::synchronised ||
           (forward_ == Forward::local_marked && local_backward_.expired());
  }
  Announcement announce(NextStep step);
  void check_scopes(std::span<const Announcement> all);
  /// The group of the scope that the peers are in.
  Group scope_of(std::uint64_t announced) const;
  /// Runs the other ranks' next step with an empty batch.
  void shadow_step(const Announcement& others);
  void drop_gradients();
  void broadcast_state_of(int rank, const JoinOptions& options);
  void start_step();
  void copy_to_bucket(Parameter& parameter);
  void check_gradient(const Parameter& parameter) const;
  void replace_kept_slice(Parameter& parameter);
  void publish_gradient(Parameter& parameter);
  /// Collective, if some rank has a gradient.
  void average_sparse(Parameter& parameter);
  void check_same_gradients();
  void send_complete_buckets();
  void finish();

  torch::nn::Module& module_;  // owned by DistributedDataParallel, the only caller
  const DistributedDataParallelOptions options_;
  std::vector<Parameter> parameters_;
  std::vector<ParameterHook> parameter_hooks_;
  std::vector<std::int64_t> bucket_order_;  // of the parameters in the buckets
  std::vector<std::int64_t> ready_order_;   // of gradients, in the step
  std::vector<Bucket> buckets_;
  std::size_t n_sent_ = 0;
  Forward forward_ = Forward::synchronised;
  std::weak_ptr<void> local_backward_;  // not expired: a local backward is running
  Phase phase_ = Phase::idle;
  bool rebuilt_ = false;
  int n_no_sync_ = 0;                   // guards alive
  std::function<at::Tensor()> shadow_;  // a forward of no samples, like the last one
  std::optional<Join> join_;            // while it runs
  int n_checks_ = 0;  // synchronised backwards left that compare the parameters, after uneven data
  std::uint64_t n_steps_ = 0;
  const bool checks_fully_;
  const bool is_alone_;  // made where there was no world, of an unset group
  const std::source_location made_at_;
  std::source_location where_;  // of the last forward or join, for errors
  Group group_;                 // after the buckets: destroyed first, together with its worker
};

}  // namespace lockstep::nn::detail
