#include "engines/shared/protocol/waiter.hpp"

#include <optional>

namespace lockstep::shared {

using std::chrono::steady_clock;

bool Waiter::yield_at_most(Condition ready) const {
  constexpr std::uint32_t kYieldsPerClock = 4;
  std::optional<steady_clock::time_point> end;
  for (std::uint32_t i = 1; i <= policy_.n_yields; ++i) {
    if (ready()) return true;
    base::yield_cpu();
    if (i % kYieldsPerClock != 0) continue;
    const auto now = steady_clock::now();
    if (!end) end = now + policy_.at_most;
    if (now >= *end) break;
  }
  return ready();
}

}  // namespace lockstep::shared
