#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

namespace lockstep::internal {

class GroupState;

/// The groups of one rank that run calls on a worker thread: the rank completes these calls before
/// it leaves the world.
class AsyncGroups {
 public:
  void add(const std::shared_ptr<GroupState>& group);
  /// Waits until every posted call has ended; each has a timeout. With `patience`, it stops waiting
  /// when no call has ended for that long.
  void wait_until_idle(std::optional<std::chrono::nanoseconds> patience = {}) noexcept;
  /// This rank leaves because of a failure: ends the calls that have not ended, on all ranks.
  void abandon_pending(std::string_view reason) noexcept;

 private:
  template <class F>
  void for_each(F f) noexcept;

  std::mutex mutex_;  // guards what follows
  std::vector<std::weak_ptr<GroupState>> groups_;
  std::size_t n_added_ = 0;
};

}  // namespace lockstep::internal
