#include "base/futex.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

namespace lockstep::base {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

namespace {

long futex(const std::atomic<std::uint32_t>& word, int operation, FutexScope scope,
           std::uint32_t value, const timespec* timeout) noexcept {
  if (scope == FutexScope::thread) operation |= FUTEX_PRIVATE_FLAG;
  return ::syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

}  // namespace

bool futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds timeout, FutexScope scope) noexcept {
  constexpr std::int64_t kNanoseconds = 1'000'000'000;
  if (timeout.count() <= 0) return false;
  const timespec limit{.tv_sec = static_cast<time_t>(timeout.count() / kNanoseconds),
                       .tv_nsec = static_cast<long>(timeout.count() % kNanoseconds)};
  const bool timed_out =
      futex(word, FUTEX_WAIT, scope, expected, &limit) != 0 && errno == ETIMEDOUT;
  return !timed_out;
}

void futex_wake_all(std::atomic<std::uint32_t>& word, FutexScope scope) noexcept {
  futex(word, FUTEX_WAKE, scope, INT_MAX, nullptr);
}

void yield_cpu() noexcept { ::sched_yield(); }

}  // namespace lockstep::base
