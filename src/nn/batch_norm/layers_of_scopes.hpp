#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>

namespace lockstep::nn {

/// The layers whose last training forward was in a SyncBatchNormScope, known by their weight or
/// running_mean; a batch_norm without either is none. Threads: any.
class LayersOfScopes {
 public:
  static LayersOfScopes& all();

  /// This forward is in a scope.
  void add(const at::Tensor& weight, const at::Tensor& running_mean);
  /// This one is not. Throws UsageError if a backward runs the forward of such a layer again: its
  /// gradients would be those of this rank's statistics.
  void remove(const at::Tensor& weight, const at::Tensor& running_mean);

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  std::atomic<bool> is_empty_{true};  // so that programs without scopes take no lock
  std::mutex mutex_;                  // guards the members below
  std::unordered_map<const c10::TensorImpl*, Weak> layers_;
  std::size_t most_ = 64;  // at more, those whose tensor is gone are erased
};

}  // namespace lockstep::nn
