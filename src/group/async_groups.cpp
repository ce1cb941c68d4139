#include "group/async_groups.hpp"

#include "group/group_state.hpp"

namespace lockstep::internal {

void AsyncGroups::add(const std::shared_ptr<GroupState>& group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& other) { return other.expired(); });
  groups_.push_back(group);
}

/// Calls f without the lock, which a thread that makes its first call needs.
template <class F>
void AsyncGroups::for_each(F f) noexcept {
  for (std::size_t i = 0;; ++i) {
    std::shared_ptr<GroupState> group;
    {
      const std::lock_guard lock(mutex_);
      if (i >= groups_.size()) return;
      group = groups_[i].lock();
    }
    if (group) f(*group);
  }
}

void AsyncGroups::wait_until_idle() noexcept {
  for_each([](GroupState& group) { group.wait_until_idle(); });
}

void AsyncGroups::abandon_pending(std::string_view reason) noexcept {
  for_each([reason](GroupState& group) {
    if (!group.is_idle()) group.abandon(reason);
  });
}

}  // namespace lockstep::internal
