#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace lockstep::base {

/// changed.wait(lock, is_true), but not by condition_variable::wait: that symbol is new in the
/// libstdc++ of GCC 12 (GLIBCXX_3.4.30), and what is compiled with it would not load with GCC 11's,
/// which RHEL 9 has.
template <class Predicate>
void wait_until_true(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                     Predicate is_true) {
  while (!changed.wait_for(lock, std::chrono::hours(1), is_true)) {
  }
}

}  // namespace lockstep::base
