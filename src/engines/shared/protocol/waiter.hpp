#pragma once

#include <chrono>

#include "base/futex.hpp"

namespace lockstep::shared {

/// How often a waiter checks whether the awaited peers are alive: well within the one second in
/// which every rank must detect a failure.
inline constexpr std::chrono::milliseconds kLivenessInterval{20};

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

/// How a rank waits for others of its host before it sleeps in the kernel. With a core for each
/// rank the peers are running now: a poll costs less than a sleep, and a wake-up takes longer than
/// most ranks are late, especially on a virtual core; so it polls, and then yields the core for a
/// while to other threads, such as its group's. If oversubscribed, every poll keeps the awaited
/// rank from running, so it yields at once, and soon sleeps.
class Waiter {
 public:
  explicit Waiter(bool is_oversubscribed = true) : is_oversubscribed_(is_oversubscribed) {}
  bool is_oversubscribed() const noexcept { return is_oversubscribed_; }

  /// The first part of the wait. Returns whether the condition holds.
  template <class Ready>
  bool poll(const Ready& ready) const {
    constexpr int kPolls = 4000;
    if (is_oversubscribed_) return yield_some(Condition(ready));
    for (int i = 0; i < kPolls; ++i) {
      if (ready()) return true;
      if (i > kPolls / 4) base::cpu_relax();
    }
    return false;
  }
  /// The second; none if oversubscribed. Returns whether the condition holds.
  bool yield(Condition ready) const;

 private:
  static bool yield_some(Condition ready);

  bool is_oversubscribed_;
};

}  // namespace lockstep::shared
