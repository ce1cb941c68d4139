#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "base/futex.hpp"
#include "base/patience.hpp"
#include "base/wait_policy.hpp"

namespace lockstep::shared {

using base::patience::kLivenessInterval;

/// Whether the round-th liveness check of a wait asks the system about the i-th of n peers. To ask
/// takes about 10 us, so a check asks about a few, in rotation: all in half a second.
inline bool asks_system(std::size_t i, std::size_t n, unsigned round) noexcept {
  constexpr std::size_t kMin = 4, kRounds = 500 / kLivenessInterval.count();
  const std::size_t n_asked = std::max(kMin, (n + kRounds - 1) / kRounds);
  return (i + n - round * n_asked % n) % n < n_asked;
}

/// What a waiter waits for: a predicate that costs a few loads.
class Condition {
 public:
  template <class Ready>
  explicit Condition(const Ready& ready)
      : ready_(&ready), ask_([](const void* r) { return (*static_cast<const Ready*>(r))(); }) {}
  bool operator()() const { return ask_(ready_); }

 private:
  const void* ready_;
  bool (*ask_)(const void*);
};

/// How a rank waits for others of its host before it sleeps in the kernel.
class Waiter {
 public:
  explicit Waiter(const base::WaitPolicy& policy) : policy_(policy) {}
  bool is_oversubscribed() const noexcept { return policy_.is_oversubscribed; }

  /// The first part of the wait before a sleep: polls; if oversubscribed, yields, and then yield()
  /// only polls once. Returns whether the condition holds.
  template <class Ready>
  bool poll(const Ready& ready) const {
    if (policy_.is_oversubscribed) return yield_at_most(Condition(ready));
    for (std::uint32_t i = 0; i < policy_.n_polls; ++i) {
      if (ready()) return true;
      if (i > policy_.n_polls / 4) base::cpu_relax();
    }
    return false;
  }
  /// The second part. Returns whether the condition holds.
  bool yield(Condition ready) const {
    return policy_.is_oversubscribed ? ready() : yield_at_most(ready);
  }

 private:
  bool yield_at_most(Condition ready) const;

  base::WaitPolicy policy_;
};

}  // namespace lockstep::shared
