#pragma once

#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>

namespace lockstep::nn {

/// While one lives, every batch_norm in training mode that this thread calls is synchronised over
/// `group`, whoever calls it: torch::nn::BatchNorm members, torch::nn::functional::batch_norm,
/// TorchScript modules. The model is not changed. Inside another scope the inner one holds.
///
/// It is done in the dispatcher, by a kernel for aten::batch_norm that looks for a scope. What it
/// computes, sends and throws is that of SyncBatchNorm2d over the same group, eps_mode plus; so is
/// what is collective: all ranks must be in a scope for the same calls, else MismatchError when the
/// others call something else. Only forward needs the scope; backward may come after it.
///
/// Not synchronised: eval mode, other threads (the replicas of DataParallel), instance_norm.
/// SyncBatchNorm modules keep their own group. A BatchNorm without running statistics calls
/// batch_norm in training mode in eval too, and libtorch refuses a batch of one value per channel
/// on this rank before the dispatcher is reached.
/// Threads: destroy it on the thread that made it, innermost first.
class SyncBatchNormScope {
 public:
  explicit SyncBatchNormScope(Group group = default_group());
  ~SyncBatchNormScope();
  SyncBatchNormScope(const SyncBatchNormScope&) = delete;
  SyncBatchNormScope& operator=(const SyncBatchNormScope&) = delete;

 private:
  Group group_;
  const Group* outer_;
};

}  // namespace lockstep::nn
