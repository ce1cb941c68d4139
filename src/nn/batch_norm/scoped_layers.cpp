#include "nn/batch_norm/scoped_layers.hpp"

#include <torch/csrc/autograd/graph_task.h>

#include <lockstep/error.hpp>

namespace lockstep::nn {

using at::Tensor;

ScopedLayers& ScopedLayers::all() {
  static auto* const all = new ScopedLayers;  // a forward may come after every destructor
  return *all;
}

void ScopedLayers::add(const Tensor& weight, const Tensor& running_mean) {
  const Tensor& state = weight.defined() ? weight : running_mean;
  if (!state.defined()) return;
  const std::lock_guard lock(mutex_);
  if (layers_.size() >= purge_threshold_) {
    std::erase_if(layers_, [](const auto& layer) { return layer.second.expired(); });
    purge_threshold_ = 2 * layers_.size() + 64;
  }
  // A weak reference keeps the address from being that of another tensor.
  layers_.try_emplace(state.unsafeGetTensorImpl(), state.getIntrusivePtr());
  is_empty_.store(false, std::memory_order_relaxed);
}

void ScopedLayers::remove(const Tensor& weight, const Tensor& running_mean) {
  const Tensor& state = weight.defined() ? weight : running_mean;
  // Relaxed: what matters is what this thread, or one that it has waited for, did before.
  if (is_empty_.load(std::memory_order_relaxed) || !state.defined()) return;
  const std::lock_guard lock(mutex_);
  const auto layer = layers_.find(state.unsafeGetTensorImpl());
  if (layer == layers_.end()) return;
  if (torch::autograd::get_current_graph_task_nodes_in_graph() != nullptr) {
    throw UsageError({.operation = "batch_norm"},
                     "backward runs this forward again (activation checkpointing), but outside the "
                     "SyncBatchNormScope of its first run: call backward inside the scope, or open "
                     "one in the function that is run again");
  }
  layers_.erase(layer);
  if (layers_.empty()) is_empty_.store(true, std::memory_order_relaxed);
}

}  // namespace lockstep::nn
