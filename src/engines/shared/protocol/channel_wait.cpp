#include <algorithm>

#include "base/membarrier.hpp"
#include "base/ticks.hpp"
#include "engines/shared/protocol/channel.hpp"
#include "record/progress.hpp"

namespace lockstep::shared {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

void Channel::increment_wake_counter() noexcept {
  header_->wake_counter.fetch_add(1, std::memory_order_seq_cst);                // model: increment
  base::futex_wake_all(header_->wake_counter, membership_->segment().scope());  // model: wake
}

void Channel::sleep(Condition ready, std::chrono::nanoseconds at_most) {
  header_->n_sleepers.fetch_add(1, std::memory_order_seq_cst);  // model: register
  if (sleepers_fence_) base::fence_registered();                // model: fence
  const std::uint32_t wake_counter =
      header_->wake_counter.load(std::memory_order_seq_cst);  // model: read_counter
  if (!ready() && !has_failed()) {                            // model: poll
    // A launcher that ends the generation sets is_over, then looks for entries: either this thread
    // sees is_over or the launcher sees its entry. The launcher may wake it just before it sleeps;
    // so it wakes again some milliseconds later, and there is the next liveness check.
    auto* const entry = membership_->begin_sleep(wake_counter_at_);
    if (!membership_->is_over()) {
      // model: block
      base::futex_wait(header_->wake_counter, wake_counter, at_most,
                       membership_->segment().scope());
    }
    Membership::end_sleep(entry);
  }
  header_->n_sleepers.fetch_sub(1, std::memory_order_seq_cst);  // model: deregister
}

void Channel::wait_asleep(const Call& call, int awaited, Condition ready) {
  if (call.progress != nullptr) call.progress->slept(call);
  if (waiter_.yield(ready)) return;
  auto now = steady_clock::now();
  auto next_check = now + kLivenessInterval;
  for (unsigned round = 0; !ready(); now = steady_clock::now()) {
    if (has_failed()) throw_failure(call);
    const bool is_over = membership_->is_over();
    if (is_over || now >= next_check) {
      check_peer_liveness(call, awaited, ready, round++);
      next_check = now + kLivenessInterval;
    }
    if (is_over && !ready()) fail_over(call);
    // The limit begins here, at the first wait that may sleep: the polls and yields before take
    // milliseconds at most, and a call that needs no more does not read the clock for it.
    const auto left = limit_.left();
    if (left == nanoseconds::zero()) {
      const std::vector<int>& ranks = late(awaited);
      if (ready()) return;
      if (awaited != kAllRanks && !ranks.empty()) fail_timeout_of_pair(call, awaited);
      if (!ranks.empty()) fail_timeout(call, ranks);
    }
    sleep(ready, left == nanoseconds::zero()
                     ? kLivenessInterval
                     : std::min<std::chrono::nanoseconds>(left, kLivenessInterval));
  }
}

const std::vector<int>& Channel::absent(int awaited) {
  absent_.clear();
  if (awaited != kAllRanks) {
    absent_.push_back(awaited);
    return absent_;
  }
  for (const int peer : peers_) {
    if (!is_raised(flag_of(peer))) absent_.push_back(peer);
  }
  return absent_;
}

const std::vector<int>& Channel::late(int awaited) {
  absent(awaited);
  // Relaxed: a returning rank updates its extension before it raises its flag, so while the flag is
  // not raised, the value read is the valid extension, or none.
  std::erase_if(absent_, [this, now = base::ticks()](int rank) {
    return lane(rank).record.deadline_extended_until.load(std::memory_order_relaxed) > now &&
           !membership_->is_stopped(world_rank(rank));
  });
  return absent_;
}

void Channel::extend_deadline(std::chrono::nanoseconds at_most) noexcept {
  // In ticks, which are the same in every time namespace.
  const base::TickAnchor now = base::now();
  const base::TickScale scale(membership_->joined(), now);
  lane(rank_).record.deadline_extended_until.store(now.ticks + scale.ticks_in(at_most),
                                                   std::memory_order_relaxed);
}

void Channel::check_peer_liveness(const Call& call, int awaited, Condition ready, unsigned round) {
  const std::vector<int>& ranks = absent(awaited);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (awaited == kAllRanks && n_refused_by(ranks[i]) > call.n_refused) {
      if (ready()) return;
      if (is_raised(flag_of(ranks[i]))) continue;
      if (has_failed()) throw_failure(call);
      fail_mismatch(call);
    }
    if (!membership_->ending_of(world_rank(ranks[i]), asks_system(i, ranks.size(), round)))
      continue;
    // Before it ended, the peer may have completed its part, or recorded a failure in the channel.
    if (ready()) return;
    if (awaited == kAllRanks && is_raised(flag_of(ranks[i]))) continue;
    if (has_failed()) throw_failure(call);
    fail_ended(call, awaited);
  }
}

}  // namespace lockstep::shared
