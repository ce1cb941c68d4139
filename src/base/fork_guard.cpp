#include "base/fork_guard.hpp"

#include <pthread.h>

namespace lockstep::base {

constinit std::atomic<std::uint32_t> ForkGuard::n_forks{0};

ForkGuard::ForkGuard() noexcept {
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { n_forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  made_in_ = n_forks.load(std::memory_order_relaxed);
}

}  // namespace lockstep::base
