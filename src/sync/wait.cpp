#include "sync/wait.hpp"

#include <algorithm>
#include <thread>

#include "base/futex.hpp"

namespace lockstep::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

// About the cost of going to sleep and being woken: spinning longer gains nothing more.
constexpr nanoseconds kSpin = std::chrono::microseconds(20);

bool spin_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen) {
  const auto end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (word.load(std::memory_order_acquire) != seen) return true;
      base::cpu_relax();
    }
  } while (Clock::now() < end);
  return false;
}

}  // namespace

Expiry::Expiry(std::chrono::milliseconds limit) {
  const auto now = Clock::now();
  // Compared in milliseconds, where Deadline::never() does not overflow.
  const auto longest =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::time_point::max() - now);
  end_ = limit >= longest ? Clock::time_point::max() : now + limit;
}

nanoseconds Expiry::left() const {
  if (end_ == Clock::time_point::max()) return nanoseconds::max();
  return std::max<nanoseconds>(end_ - Clock::now(), nanoseconds::zero());
}

bool wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                     const Expiry& expiry, std::size_t n_threads) {
  static const std::size_t n_cores = std::thread::hardware_concurrency();
  if (n_threads <= n_cores && expiry.left() > kSpin && spin_for_change(word, seen)) return true;
  while (word.load(std::memory_order_acquire) == seen) {
    const nanoseconds left = expiry.left();
    if (left == nanoseconds::zero()) return false;
    base::futex_wait(word, seen, left, base::FutexScope::thread);
  }
  return true;
}

}  // namespace lockstep::detail
