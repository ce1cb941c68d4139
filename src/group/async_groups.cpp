#include "group/async_groups.hpp"

#include <algorithm>

#include "group/group_state.hpp"

namespace lockstep::internal {

void AsyncGroups::add(const std::shared_ptr<GroupState>& group) {
  const std::lock_guard lock(mutex_);
  ++n_added_;
  // Reuses the entry of a group that is gone, so that no entry moves during for_each.
  const auto gone =
      std::ranges::find_if(groups_, [](const auto& other) { return other.expired(); });
  if (gone != groups_.end()) {
    *gone = group;
  } else {
    groups_.push_back(group);
  }
}

/// Calls f without the lock, which a thread that makes its first call needs; for all again, if one
/// did meanwhile. Does not allocate.
template <class F>
void AsyncGroups::for_each(F f) noexcept {
  std::optional<std::size_t> n_added;
  for (std::size_t i = 0;; ++i) {
    std::shared_ptr<GroupState> group;
    {
      const std::lock_guard lock(mutex_);
      if (i >= groups_.size()) {
        if (n_added == n_added_) return;
        i = 0;
      }
      if (i == 0) n_added = n_added_;
      if (groups_.empty()) return;
      group = groups_[i].lock();
    }
    if (group) f(*group);
  }
}

void AsyncGroups::wait_until_idle(std::optional<std::chrono::nanoseconds> patience) noexcept {
  using Clock = detail::JobClock;
  auto last_end = Clock::now();
  for_each([&](GroupState& group) {
    if (!patience) return group.wait_until_idle();
    while (group.wait_for_one(*patience - (Clock::now() - last_end))) last_end = Clock::now();
  });
}

void AsyncGroups::abandon_pending(std::string_view reason) noexcept {
  for_each([reason](GroupState& group) {
    if (!group.is_idle()) group.abandon(reason);
  });
}

}  // namespace lockstep::internal
