#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/nn/replication.hpp>
#include <lockstep/nn/tensor_trees.hpp>

namespace lockstep::nn {

/// What a communication hook gets: the gradients of one bucket, complete on this rank.
struct GradientBucket {
  at::Tensor gradients;   ///< 1-d, contiguous; what stands here in the end are the gradients
  std::size_t index = 0;  ///< in the order of sending, the same on all ranks
  Group group;            ///< DistributedDataParallel's own: for the hook to communicate in
};

/// Starts the communication of a bucket, in backward, and returns what completes it: it is called
/// before backward returns, bucket by bucket. Work on `group` may be under way between the two.
using CommunicationHook = std::function<std::function<void()>(const GradientBucket&)>;

/// Hooks that send gradients as float16 or bfloat16: half of float32's bytes. The average is made
/// in float32 and rounded to the type once.
CommunicationHook f16_compression();
CommunicationHook bf16_compression();

struct DistributedDataParallelOptions {
  std::optional<Group> group = {};  ///< unset: the default group when the module is wrapped
  double bucket_size_mb = 25;       ///< a bucket is sent when it holds this many MiB of gradients
  double first_bucket_size_mb = 1;  ///< the first is small, so that sending starts early
  /// Rank 0's buffers go to all before every synchronised forward.
  bool broadcast_buffers = false;
  /// A parameter that got a gradient on some ranks only: zero on the others, or a MismatchError on
  /// every rank, naming it.
  bool find_unused_parameters = false;
  /// Parameters that got no gradient on this rank in the first backward never will: their buckets
  /// need not wait for the end of backward. UsageError where one does.
  bool static_graph = false;
  CommunicationHook hook = {};  ///< in the place of an all_reduce with mean
  /// In join(), gradients are averaged over the ranks that still have data, not over all.
  bool join_divides_by_active = false;
};

struct JoinOptions {
  /// Inputs of the module, for ranks that may have no batch at all: their shape and type count.
  at::Tensor example_input = {};
  /// In its place, for modules whose forward takes other arguments: calls the module inside with
  /// inputs of 0 rows and returns a tensor of what it returns.
  std::function<at::Tensor()> example_forward = {};
  /// All that have a state (momentum, Adam): ranks out of data make no steps, and get the state of
  /// a rank that trained longest. In the same order on all ranks.
  std::vector<torch::optim::Optimizer*> optimizers = {};
};

namespace detail {
class Reducer;
std::shared_ptr<Reducer> make_reducer(torch::nn::Module& module,
                                      const DistributedDataParallelOptions& options,
                                      std::source_location where);
void before_forward(Reducer& reducer);
/// What a forward returned, if it is wanted.
void after_forward(Reducer& reducer, const std::vector<at::Tensor>& outputs);
bool wants_outputs(const Reducer& reducer);
/// `shadow`: a forward without samples, like the last one.
void set_shadow(Reducer& reducer, std::function<at::Tensor()> shadow);
bool wants_shadow(const Reducer& reducer);
void join(Reducer& reducer, const std::function<void()>& body, const JoinOptions& options,
          std::source_location where);

template <class T>
T without_samples(const T& value) {
  if constexpr (std::same_as<T, at::Tensor>) {
    if (value.defined() && value.dim() > 0) return value.detach().narrow(0, 0, 0).clone();
  }
  return value;
}
}  // namespace detail

/// While one lives, forward passes of its DistributedDataParallel belong to no synchronisation:
/// their backward only accumulates gradients on this rank.
class NoSync {
 public:
  explicit NoSync(std::shared_ptr<detail::Reducer> reducer);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<detail::Reducer> reducer_;
};

/// A module (a ModuleHolder or a shared_ptr) whose gradients are averaged over the ranks.
///
/// Construction is collective over the group: parameter and buffer names, shapes and types are
/// compared (MismatchError on every rank, naming the first difference), then rank 0's values go to
/// all. It takes a group of its own (Group::duplicate) for the gradients, so that modules that
/// communicate in backward, such as SyncBatchNorm, never meet them.
///
/// backward() returns with the same averaged gradients on every rank. Each bucket of gradients is
/// reduced by the group's worker thread as soon as it is complete, while backward goes on;
/// gradients are then slices of the buckets, so nothing is copied back. For a loss that is a mean
/// over unequal shares of a batch, scale it: sum over the own samples / global batch * world size.
///
/// A parameter that got no gradient on any rank keeps none; for one that got none on this rank see
/// find_unused_parameters. A rank whose loss depends on no parameter at all must not skip backward:
/// the others wait for it. Parameters that require no gradient take no part. What comes to require
/// one later, or is registered later, on all ranks alike, is found at the next synchronised
/// forward; so is one that torch::load, Module::to or set_data has changed. Rank 0's values go to
/// all then. Where a backward comes first, it throws UsageError, unless its gradients are still
/// averaged.
///
/// A forward through the module inside is averaged too. What only this object's forward does is
/// missing then: no_sync, join, broadcast_buffers, looking for changed parameters. A parameter in
/// two of these objects that live is a UsageError from backward.
///
/// After the first synchronised backward the buckets are made anew, in the order in which rank 0's
/// gradients came.
///
/// Errors: what the group's calls throw, from backward(), with the line of the construction (or of
/// join) and the parameters that the call was about. After an exception in a synchronised
/// backward the next forward throws UsageError: ranks may be out of step, build a new one. Not so
/// after the MismatchError of find_unused_parameters: zero the gradients and go on.
/// Parameters on several devices are a UsageError. Those on CUDA have their buckets on the host:
/// gradients are copied there and back.
/// Threads: use it from one thread. A copyable handle, like ModuleHolder.
template <class M>
class DistributedDataParallel {
 public:
  explicit DistributedDataParallel(M module, const DistributedDataParallelOptions& options = {},
                                   std::source_location where = std::source_location::current())
  static_assert(detail::require_module_handle<M>());
  using Where = std::source_location;

      : module_(std::move(module)), reducer_(detail::make_reducer(*module_, options, where)) {}

  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    if (detail::wants_shadow(*reducer_)) remember_shadow(args...);
    detail::before_forward(*reducer_);
    using Output = decltype(module_->forward(std::forward<Args>(args)...));
    if constexpr (detail::Tree<std::remove_cvref_t<Output>>::kHasTensors) {
      decltype(auto) output = module_->forward(std::forward<Args>(args)...);
      if (detail::wants_outputs(*reducer_)) {
        detail::after_forward(*reducer_, detail::tensors_of<std::remove_cvref_t<Output>>(output));
      }
      return output;
    } else {
      return module_->forward(std::forward<Args>(args)...);
    }
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// Gradients accumulate locally for forward passes within the life of the result.
  [[nodiscard]] NoSync no_sync() const { return NoSync(reducer_); }

  /// For ranks that have different numbers of batches. Runs `body`, the training loop; then, while
  /// other ranks still train, this one follows each of their steps with a forward and backward of
  /// no samples, so that the collectives of this object and of the SyncBatchNorms in the module go
  /// on (those of a SyncBatchNormScope in body too): it contributes zero gradients and statistics
  /// of count 0. In the end all have the parameters, buffers and, of the optimizers given, the
  /// state of the first rank among those that trained longest. Collective.
  ///
  /// An optimizer with momentum or the like that is not given would step differently on each rank
  /// after that: the synchronised forwards that follow compare the parameters and throw
  /// MismatchError.
  ///
  /// The module must accept inputs of 0 rows and return a tensor; other arguments than tensors are
  /// those of its last forward here. A rank that may have no batch at all gives an example. `body`
  /// has one backward per forward (no_sync() is seen), and communicates through nothing else.
  template <class Body>
  void join(Body&& body, const JoinOptions& options = {},
            std::source_location where = std::source_location::current()) {
    if (options.example_forward) {
      detail::set_shadow(*reducer_, options.example_forward);
    } else if (options.example_input.defined()) {
      remember_shadow(options.example_input);
    }
    detail::join(*reducer_, std::forward<Body>(body), options, where);
  }
  M& module() { return module_; }
  const M& module() const { return module_; }

 private:
  template <class... Args>
  void remember_shadow(const Args&... args) {
    if constexpr (requires {
                    { module_->forward(std::declval<Args&>()...) } -> std::same_as<at::Tensor>;
                  } &&
                  (std::copy_constructible<Args> && ...)) {
      detail::set_shadow(
          *reducer_, [module = module_,
                      empty = std::tuple<Args...>(detail::without_samples(args)...)]() mutable {
            return std::apply([&](Args&... again) { return module->forward(again...); }, empty);
          });
    }
  }

  M module_;
  std::shared_ptr<detail::Reducer> reducer_;
};

}  // namespace lockstep::nn
