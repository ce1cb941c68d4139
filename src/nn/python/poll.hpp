#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace lockstep::python {

/// How ranks wait for what a store will hold: its own wait keeps the store from this process's
/// other threads, and does not see that a rank has ended.
/// Calls `done` until it returns true, or the deadline has come.
template <class Done>
void poll_until(std::chrono::steady_clock::time_point deadline, Done done) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kFirstPause{1}, kLongestPause{64};
  for (auto pause = kFirstPause; !done(); pause = std::min(2 * pause, kLongestPause)) {
    const auto left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) return;
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, left));
  }
}

}  // namespace lockstep::python
