#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>

namespace lockstep::nn {

/// The layers whose last training forward was in a SyncBatchNormScope, identified by their weight
/// or running_mean. A batch_norm without either is not tracked. Threads: any.
class ScopedLayers {
 public:
  static ScopedLayers& all();

  /// Records that the layer's forward ran in a scope.
  void add(const at::Tensor& weight, const at::Tensor& running_mean);
  /// Records that it ran outside any scope. Throws UsageError if backward recomputes the forward of
  /// a recorded layer: its gradients would be those of this rank's statistics.
  void remove(const at::Tensor& weight, const at::Tensor& running_mean);

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  std::atomic<bool> is_empty_{true};  // so that programs without scopes take no lock
  std::mutex mutex_;                  // guards the members below
  std::unordered_map<const c10::TensorImpl*, Weak> layers_;
  std::size_t purge_threshold_ = 64;  // from this size on, entries of freed tensors are erased
};

}  // namespace lockstep::nn
