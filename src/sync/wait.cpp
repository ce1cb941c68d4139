#include "sync/wait.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "base/cpus.hpp"
#include "base/futex.hpp"

namespace lockstep::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

}  // namespace

bool SpinTime::spin(const std::atomic<std::uint32_t>& word, std::uint32_t seen) {
  // Relaxed, and updates may be lost: it is an estimate.
  const std::uint32_t time_ns = time_ns_.load(std::memory_order_relaxed);
  const auto end = Clock::now() + nanoseconds(time_ns);
  bool changed = false;
  do {
    for (int i = 0; i < 16 && !changed; ++i) {
      base::cpu_relax();
      changed = word.load(std::memory_order_acquire) != seen;
    }
  } while (!changed && Clock::now() < end);
  const std::uint32_t next_ns =
      std::clamp(changed ? time_ns * 2 : time_ns / 2, kShortestNs, kLongestNs);
  if (next_ns != time_ns) time_ns_.store(next_ns, std::memory_order_relaxed);
  return changed;
}

bool wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                     detail::TimeLimit& limit, SpinTime& spin_time, std::size_t n_threads) {
  static const int n_cores =
      base::n_usable_cores(base::allowed_cpus(::getpid()), base::cpu_quota());
  const auto policy = base::WaitPolicy::of_threads(static_cast<int>(n_threads), n_cores);
  if (word.load(std::memory_order_acquire) != seen) return true;
  if (!policy.is_oversubscribed && limit.left() > nanoseconds::zero() &&
      spin_time.spin(word, seen)) {
    return true;
  }
  while (word.load(std::memory_order_acquire) == seen) {
    const nanoseconds left = limit.left();
    if (left == nanoseconds::zero()) return false;
    base::futex_wait(word, seen, left, base::FutexScope::thread);
  }
  return true;
}

}  // namespace lockstep::detail
