#include <fmt/format.h>

#include <lockstep/error.hpp>
#include <lockstep/sync.hpp>

#include "base/futex.hpp"
#include "sync/wait.hpp"

// Protocol of FutureResult. One state word controls access to the value:
//
//   empty --begin_put--> changing --end_put--> full --begin_get--> changing --end_get--> empty
//
// begin_* enter by compare-exchange, so only one thread at a time is in `changing`; end_* release
// what it wrote to the next one. Getters wait for the word to become full; no thread waits for
// empty. Before sleeping, a getter sets kAwaited, which only end_put clears. So a put makes the
// system call only if a getter sleeps, and accesses nothing of the object after the exchange that
// lets a getter continue and destroy it.

namespace lockstep::detail {
namespace {

constexpr std::uint32_t kEmpty = 0;
constexpr std::uint32_t kChanging = 1;
constexpr std::uint32_t kFull = 2;
constexpr std::uint32_t kAwaited = 4;

constexpr std::chrono::milliseconds kTimeout = std::chrono::minutes(5);

ErrorContext context(const char* operation, std::source_location where) {
  return {.operation = operation, .group = {}, .rank = -1, .sequence = 0, .where = where};
}

}  // namespace

void FutureGate::begin_put(std::source_location where) {
  std::uint32_t state = state_.load(std::memory_order_relaxed);
  do {
    if ((state & ~kAwaited) != kEmpty) {
      throw UsageError(context("FutureResult::put", where),
                       "a second put before a get took the first value; get it first, or use one "
                       "FutureResult per value");
    }
    // acquire: the previous getter has cleared the value.
  } while (!state_.compare_exchange_weak(state, kChanging | (state & kAwaited),
                                         std::memory_order_acquire, std::memory_order_relaxed));
}

void FutureGate::end_put() noexcept {
  const std::uint32_t before = state_.exchange(kFull, std::memory_order_release);
  if ((before & kAwaited) != 0) base::futex_wake_all(state_, base::FutexScope::thread);
}

void FutureGate::cancel_put() noexcept {
  state_.fetch_and(~kChanging, std::memory_order_release);  // waiters keep waiting
  base::futex_wake_all(state_, base::FutexScope::thread);
}

void FutureGate::begin_get(Timeout timeout, std::source_location where) {
  const auto limit = timeout.or_else(kTimeout);
  detail::TimeLimit time_limit(limit);
  SpinTime spin_time;
  std::uint32_t state = state_.load(std::memory_order_relaxed);
  for (;;) {
    if (state == kFull) {
      // acquire: the value written by the putter.
      if (state_.compare_exchange_weak(state, kChanging, std::memory_order_acquire,
                                       std::memory_order_relaxed)) {
        return;
      }
      continue;
    }
    if ((state & kAwaited) == 0 &&
        !state_.compare_exchange_weak(state, state | kAwaited, std::memory_order_relaxed)) {
      continue;
    }
    if (!wait_for_change(state_, state | kAwaited, time_limit, spin_time, /*n_threads=*/2)) {
      throw TimeoutError(context("FutureResult::get", where),
                         fmt::format("no value was put within {} ms; check the thread that should "
                                     "put it, or give a longer timeout",
                                     limit.count()));
    }
    state = state_.load(std::memory_order_relaxed);
  }
}

bool FutureGate::is_full() const noexcept {
  return state_.load(std::memory_order_relaxed) == kFull;  // begin_get synchronises
}

void FutureGate::end_get() noexcept {
  // Keeps kAwaited: other getters still sleep and wait for the word to change.
  const std::uint32_t before = state_.fetch_and(~kChanging, std::memory_order_release);
  if ((before & kAwaited) != 0) base::futex_wake_all(state_, base::FutexScope::thread);
}

}  // namespace lockstep::detail
