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
  /// inputs of 0 rows and returns a tensor of what it returns. Kept until join returns.
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
/// `where`: the forward's line, where it is known.
void before_forward(Reducer& reducer, const std::optional<std::source_location>& where);
/// What a forward returned, if it is wanted.
void after_forward(Reducer& reducer, const std::vector<at::Tensor>& outputs);
bool wants_outputs(const Reducer& reducer);
/// `shadow`: a forward without samples, like the last one.
void set_shadow(Reducer& reducer, std::function<at::Tensor()> shadow);
bool wants_shadow(const Reducer& reducer);
/// `example`: a forward without samples, for this join alone; may be empty.
void join(Reducer& reducer, const std::function<void()>& body, const JoinOptions& options,
          std::function<at::Tensor()> example, std::source_location where);

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
/// Errors: what the group's calls throw, from backward(), with the line of the last forward (in
/// join, of that; after a forward of more than four arguments, of the construction) and the
/// parameters that the call was about. After an exception in a synchronised
/// backward the next forward throws UsageError: ranks may be out of step, build a new one. Not so
/// after the MismatchError of find_unused_parameters: zero the gradients and go on.
/// Parameters on several devices are a UsageError. Those on CUDA have their buckets on the host:
/// gradients are copied there and back.
/// Threads: use it from one thread. A copyable handle, like ModuleHolder.
template <class M>
class DistributedDataParallel {
  static_assert(detail::require_module_handle<M>());
  using Where = std::source_location;

 public:
  explicit DistributedDataParallel(M module, const DistributedDataParallelOptions& options = {},
                                   Where where = Where::current())
      : module_(std::move(module)), reducer_(detail::make_reducer(*module_, options, where)) {}

  /// The module's forward. A parameter pack leaves no place for the caller's line, so there is one
  /// for each number of arguments up to four.
  decltype(auto) forward(Where where = Where::current()) { return forward_at(where); }
  template <class A>
  decltype(auto) forward(A&& a, Where where = Where::current()) {
    return forward_at(where, std::forward<A>(a));
  }
  template <class A, class B>
  decltype(auto) forward(A&& a, B&& b, Where where = Where::current()) {
    return forward_at(where, std::forward<A>(a), std::forward<B>(b));
  }
  template <class A, class B, class C>
  decltype(auto) forward(A&& a, B&& b, C&& c, Where where = Where::current()) {
    return forward_at(where, std::forward<A>(a), std::forward<B>(b), std::forward<C>(c));
  }
  template <class A, class B, class C, class D>
  decltype(auto) forward(A&& a, B&& b, C&& c, D&& d, Where where = Where::current()) {
    return forward_at(where, std::forward<A>(a), std::forward<B>(b), std::forward<C>(c),
                      std::forward<D>(d));
  }
  template <class... Args>
  requires(sizeof...(Args) > 4) decltype(auto) forward(Args&&... args) {
    return forward_at(std::nullopt, std::forward<Args>(args)...);
  }
  decltype(auto) operator()(Where where = Where::current()) { return forward_at(where); }
  template <class A>
  decltype(auto) operator()(A&& a, Where where = Where::current()) {
    return forward_at(where, std::forward<A>(a));
  }
  template <class A, class B>
  decltype(auto) operator()(A&& a, B&& b, Where where = Where::current()) {
    return forward_at(where, std::forward<A>(a), std::forward<B>(b));
  }
  template <class A, class B, class C>
  decltype(auto) operator()(A&& a, B&& b, C&& c, Where where = Where::current()) {
    return forward_at(where, std::forward<A>(a), std::forward<B>(b), std::forward<C>(c));
  }
  template <class A, class B, class C, class D>
  decltype(auto) operator()(A&& a, B&& b, C&& c, D&& d, Where where = Where::current()) {
    return forward_at(where, std::forward<A>(a), std::forward<B>(b), std::forward<C>(c),
                      std::forward<D>(d));
  }
  template <class... Args>
  requires(sizeof...(Args) > 4) decltype(auto) operator()(Args&&... args) {
    return forward_at(std::nullopt, std::forward<Args>(args)...);
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
  /// has one backward per forward (no_sync() is seen), and communicates through nothing else. An
  /// LBFGS whose steps depend on the loss, which differs between the ranks, is a UsageError; with
  /// max_iter(1) and no line search they do not.
  template <class Body>
  void join(Body&& body, const JoinOptions& options = {}, Where where = Where::current()) {
    std::function<at::Tensor()> example = options.example_forward;
    if (!example && options.example_input.defined()) {
      example = without_samples(options.example_input);
    }
    detail::join(*reducer_, std::forward<Body>(body), options, std::move(example), where);
  }
  M& module() { return module_; }
  const M& module() const { return module_; }

 private:
  template <class... Args>
  decltype(auto) forward_at(const std::optional<Where>& where, Args&&... args) {
    if (detail::wants_shadow(*reducer_)) {
      if (auto shadow = without_samples(args...)) detail::set_shadow(*reducer_, std::move(shadow));
    }
    detail::before_forward(*reducer_, where);
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

  /// The forward of such arguments, with no samples; empty where it returns no tensor.
  template <class... Args>
  std::function<at::Tensor()> without_samples(const Args&... args) {
    if constexpr (requires {
                    { module_->forward(std::declval<Args&>()...) } -> std::same_as<at::Tensor>;
                  } &&
                  (std::copy_constructible<Args> && ...)) {
      return [module = module_,
              empty = std::tuple<Args...>(detail::without_samples(args)...)]() mutable {
        return std::apply([&](Args&... again) { return module->forward(again...); }, empty);
      };
    }
    return {};
  }

  M module_;
  std::shared_ptr<detail::Reducer> reducer_;
};

}  // namespace lockstep::nn
