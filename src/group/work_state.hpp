#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

#include "base/wait_until_true.hpp"

namespace lockstep::internal {

/// The result of one posted call.
class WorkState {
 public:
  /// Before finish(), by the thread of the call.
  void fail(std::exception_ptr error) noexcept { error_ = std::move(error); }
  void finish() noexcept {
    {
      const std::lock_guard lock(mutex_);
      is_done_ = true;
    }
    finished_.notify_all();
  }
  void wait_until_done() noexcept {
    std::unique_lock lock(mutex_);
    base::wait_until_true(finished_, lock, [this] { return is_done_; });
  }
  /// Rethrows the call's error.
  void wait() {
    wait_until_done();
    if (error_) std::rethrow_exception(error_);
  }
  bool done() const {
    const std::lock_guard lock(mutex_);
    return is_done_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  bool is_done_ = false;
  std::exception_ptr error_;
};

}  // namespace lockstep::internal
