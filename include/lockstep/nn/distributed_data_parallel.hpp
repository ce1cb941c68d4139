#pragma once

#include <torch/nn/module.h>

#include <concepts>
#include <memory>
#include <source_location>
#include <utility>

#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>

namespace lockstep::nn {

struct DistributedDataParallelOptions {
  Group group = default_group();
  double bucket_size_mb = 25;       ///< a bucket is sent when it holds this many MiB of gradients
  double first_bucket_size_mb = 1;  ///< the first is small, so that sending starts early
};

namespace detail {
class Reducer;
std::shared_ptr<Reducer> make_reducer(torch::nn::Module& module,
                                      const DistributedDataParallelOptions& options,
                                      std::source_location where);
void before_forward(Reducer& reducer);
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
/// A parameter that got no gradient on this rank counts as zero; one that got none on any rank
/// keeps none. A rank whose loss depends on no parameter at all must not skip backward: the others
/// wait for it. Parameters that require no gradient at construction take no part.
///
/// Errors: what the group's calls throw, from backward(). After an exception in a synchronised
/// backward the next forward throws UsageError: ranks may be out of step, build a new one.
/// CPU only. Threads: use it from one thread. A copyable handle, like ModuleHolder.
template <class M>
requires requires(M& module) {
  { *module } -> std::convertible_to<torch::nn::Module&>;
}
class DistributedDataParallel {
 public:
  explicit DistributedDataParallel(M module, const DistributedDataParallelOptions& options = {},
                                   std::source_location where = std::source_location::current())
      : module_(std::move(module)), reducer_(detail::make_reducer(*module_, options, where)) {}

  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    detail::before_forward(*reducer_);
    return module_->forward(std::forward<Args>(args)...);
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// Gradients accumulate locally for forward passes within the life of the result.
  [[nodiscard]] NoSync no_sync() const { return NoSync(reducer_); }
  M& module() { return module_; }
  const M& module() const { return module_; }

 private:
  M module_;
  std::shared_ptr<detail::Reducer> reducer_;
};

}  // namespace lockstep::nn
