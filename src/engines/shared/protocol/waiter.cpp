#include "engines/shared/protocol/waiter.hpp"

#include <optional>

namespace lockstep::shared {
namespace {

using std::chrono::steady_clock;

/// Measured in time because a yield to busy programs takes milliseconds.
constexpr std::chrono::microseconds kPatience{1500};

}  // namespace

bool Waiter::yield_some(Condition ready) {
  constexpr int kYields = 100, kYieldsPerClock = 4;
  std::optional<steady_clock::time_point> end;
  for (int i = 1; i <= kYields; ++i) {
    if (ready()) return true;
    base::yield_cpu();
    if (i % kYieldsPerClock != 0) continue;
    const auto now = steady_clock::now();
    if (!end) end = now + kPatience;
    if (now >= *end) break;
  }
  return false;
}

bool Waiter::yield(Condition ready) const {
  if (is_oversubscribed_) return ready();
  for (const auto end = steady_clock::now() + kPatience; steady_clock::now() < end;) {
    if (ready()) return true;
    base::yield_cpu();
  }
  return ready();
}

}  // namespace lockstep::shared
