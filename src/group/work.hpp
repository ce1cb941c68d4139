#pragma once

#include <atomic>
#include <memory>
#include <string_view>

#include "group/group_state.hpp"

namespace lockstep::internal {

/// The state shared by the copies of one Work: the caller's buffers must live as long.
class WorkHandle {
 public:
  /// Posts the call: the call is not made without a handle that waits for it.
  WorkHandle(std::shared_ptr<GroupState> group, const Call& call, Timeout timeout);
  /// Waits, unless detached. See Work.
  ~WorkHandle();
  WorkHandle(const WorkHandle&) = delete;
  WorkHandle& operator=(const WorkHandle&) = delete;

  WorkState& state() const noexcept { return *state_; }
  bool is_forked_child() const noexcept { return process_.is_forked_child(); }
  void detach() noexcept { is_detached_.store(true, std::memory_order_relaxed); }

 private:
  base::ForkGuard process_;
  std::shared_ptr<GroupState> group_;
  int n_exceptions_;  ///< uncaught exceptions of the thread when the call was posted
  std::atomic<bool> is_detached_{false};
  std::shared_ptr<WorkState> state_;  // last: nothing may throw after the call is posted
};

}  // namespace lockstep::internal
