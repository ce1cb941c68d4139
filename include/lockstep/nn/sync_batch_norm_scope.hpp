#pragma once

#include <memory>
#include <optional>
#include <source_location>

#include <lockstep/group.hpp>

namespace lockstep::nn {

namespace detail {
struct ScopeEntry;
}  // namespace detail

/// During its lifetime, every training-mode batch_norm call of this thread is synchronised over
/// `group` (unset: the default group at each call), from any caller: torch::nn::BatchNorm members,
/// torch::nn::functional::batch_norm, TorchScript modules. The model is not changed. If scopes are
/// nested, the innermost applies.
///
/// Implemented in the dispatcher, by a kernel for aten::batch_norm that checks for a scope. It
/// computes, communicates and throws as SyncBatchNorm2d over the same group with eps_mode plus, and
/// is collective in the same way: all ranks must be in a scope for the same calls, otherwise
/// MismatchError if the others call something else. backward may run after the scope has ended,
/// unless it runs forwards again (activation checkpointing): then it belongs inside the scope, or
/// the function that is run again opens one. Elsewhere such a forward throws UsageError if its
/// weight or running_mean was last used in a scope.
///
/// Not synchronised: eval mode with running statistics, other threads, instance_norm. In the
/// replicas of a DataParallel a training batch_norm in a scope throws UsageError: use
/// convert_sync_batchnorm there. SyncBatchNorm modules keep their own group. A BatchNorm without
/// running statistics calls batch_norm in training mode also in eval mode, so that its eval is
/// synchronised, unlike that of a converted layer; and libtorch rejects a batch of one value per
/// channel on this rank before the dispatcher is reached (a converted layer does not). Errors name
/// the layer by its number among the calls in this scope, and the scope's line (none if the
/// standard library constructs the scope, as std::optional::emplace does). The ranks' calls are
/// matched by order and width: layers of equal width called in another order on one rank are not
/// detected.
/// Threads: it applies on the thread that created it, until it is destroyed, by any thread and in
/// any order.
class SyncBatchNormScope {
 public:
  /// The group, and the source line that errors name. A copy may outlive the scope.
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

  /// The settings of the innermost scope on this thread, to repeat a forward later in an equal
  /// scope; nullopt if there is none.
  static std::optional<Settings> active();

 private:
  std::shared_ptr<detail::ScopeEntry> entry_;
};

}  // namespace lockstep::nn
