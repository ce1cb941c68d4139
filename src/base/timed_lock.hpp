#pragma once

#include <pthread.h>

#include <chrono>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace lockstep::base {

/// Waits for the mutex at most this long, however the system's clock is set meanwhile. Returns
/// what pthread_mutex_clocklock does.
inline int timed_lock(pthread_mutex_t& mutex, std::chrono::nanoseconds at_most) noexcept {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const auto seconds = std::chrono::floor<std::chrono::seconds>(now + at_most);
  const timespec end{.tv_sec = seconds.count(), .tv_nsec = (now + at_most - seconds).count()};
#if defined(__SANITIZE_THREAD__)  // does not know pthread_mutex_clocklock
  __tsan_mutex_pre_lock(&mutex, __tsan_mutex_try_lock);
#endif
  const int error = ::pthread_mutex_clocklock(&mutex, CLOCK_MONOTONIC, &end);
#if defined(__SANITIZE_THREAD__)
  const bool has_failed = error != 0 && error != EOWNERDEAD;
  __tsan_mutex_post_lock(
      &mutex, __tsan_mutex_try_lock | (has_failed ? __tsan_mutex_try_lock_failed : 0U), 0);
#endif
  return error;
}

}  // namespace lockstep::base
