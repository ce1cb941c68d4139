#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "group/posted_call.hpp"

namespace lockstep::internal {

/// Result of one operation posted to a Worker.
class WorkState {
 public:
  void wait();
  void wait_until_done() noexcept;
  bool done() const;
  void finish(std::exception_ptr error);

 private:
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  bool is_done_ = false;
  std::exception_ptr error_;
};

/// A group's thread, which runs the group's asynchronous calls in posting order, to overlap
/// communication with computation (docs/design/002-async-worker.md).
class Worker {
 public:
  Worker();
  /// Runs all posted operations, then ends the thread.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::shared_ptr<WorkState> post(std::function<void()> task, const PostedCall& call);
  bool is_idle() const noexcept { return n_pending_.load(std::memory_order_acquire) == 0; }
  void wait_until_idle();
  /// At most that long; returns the first task that is pending then.
  std::optional<PostedCall> wait_until_idle(std::chrono::nanoseconds at_most);
  /// Waits until one of the pending operations has ended; false: none is pending, or none has in
  /// that time.
  bool wait_for_one(std::chrono::nanoseconds at_most);

 private:
  struct Task {
    std::function<void()> run;
    std::shared_ptr<WorkState> state;
    PostedCall call;
  };

  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  PostedCall current_;  // what runs, if any
  bool is_closing_ = false;
  std::atomic<std::size_t> n_pending_{0};
  std::thread thread_;  // last: starts when the other members exist
};

}  // namespace lockstep::internal
