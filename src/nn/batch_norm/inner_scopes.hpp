#pragma once

#include <memory>
#include <optional>

#include <lockstep/nn/sync_batch_norm_scope.hpp>

namespace lockstep::nn {

/// While it exists on the thread of a DataParallel replica, a batch_norm in a scope (the caller's
/// or the replica's own) throws UsageError, because it would see only the replica's part of the
/// batch. A SyncBatchNorm exchanges statistics with the other replicas itself.
class ReplicaScope {
 public:
  explicit ReplicaScope(std::optional<SyncBatchNormScope::Settings> callers);
  ~ReplicaScope();
  ReplicaScope(const ReplicaScope&) = delete;
  ReplicaScope& operator=(const ReplicaScope&) = delete;

 private:
  std::shared_ptr<detail::ScopeEntry> entry_;
};

/// While one exists, no SyncBatchNormScope applies on this thread.
class SuspendedScope {
 public:
  SuspendedScope();
  ~SuspendedScope();
  SuspendedScope(const SuspendedScope&) = delete;
  SuspendedScope& operator=(const SuspendedScope&) = delete;

 private:
  std::shared_ptr<detail::ScopeEntry> entry_;  // null if none applied before
};

}  // namespace lockstep::nn
