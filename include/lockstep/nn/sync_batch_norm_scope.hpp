#pragma once

#include <cstdint>
#include <optional>
#include <source_location>

#include <lockstep/group.hpp>

namespace lockstep::nn {

class SyncBatchNormScope;

namespace detail {
struct Layer;
Layer next_layer(SyncBatchNormScope& scope, std::int64_t n_channels);
}  // namespace detail

/// While one lives, every batch_norm in training mode that this thread calls is synchronised over
/// `group` (unset: the default group at each call), whoever calls it: torch::nn::BatchNorm members,
/// torch::nn::functional::batch_norm, TorchScript modules. The model is not changed. Inside another
/// scope the inner one holds.
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
/// Errors name the layer by its number among the calls in this scope, and the scope's line.
/// Threads: destroy it on the thread that made it, innermost first.
class SyncBatchNormScope {
 public:
  /// Over which group, and whose line errors name. A copy may outlive the scope.
  struct Settings {
    std::optional<Group> group;
    std::source_location where;
  };

  explicit SyncBatchNormScope(std::optional<Group> group = std::nullopt,
                              std::source_location where = std::source_location::current());
  explicit SyncBatchNormScope(Settings settings);
  ~SyncBatchNormScope();
  SyncBatchNormScope(const SyncBatchNormScope&) = delete;
  SyncBatchNormScope& operator=(const SyncBatchNormScope&) = delete;

  /// Those of the innermost scope on this thread; for who repeats a forward later, in a scope
  /// alike.
  static std::optional<Settings> active();

 private:
  friend detail::Layer detail::next_layer(SyncBatchNormScope& scope, std::int64_t n_channels);

  Settings settings_;
  std::int64_t n_layers_ = 0;
  SyncBatchNormScope* outer_;
};

}  // namespace lockstep::nn
