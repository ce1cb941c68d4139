#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <lockstep/detail/time_limit.hpp>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace lockstep::internal {

/// An asynchronous call, as errors name it.
struct PostedCall {
  std::string_view operation;  ///< static
  std::source_location where{};

  /// The error of a call that timed out while it waited for this one.
  std::string waited_for(int rank, double limit_s) const;
};

/// The calls on one group, one at a time: posted ones in their order, on a thread that the first of
/// them starts, to overlap communication with computation (docs/design/002-async-worker.md); others
/// on the calling thread, after those posted before. It must not be destroyed in a fork of its
/// process, where its threads and, perhaps, the owner of its mutex do not exist.
class CallQueue {
 public:
  using Callbacks = std::function<void()>;
  using Completion = std::function<Callbacks()>;

  /// Closes a queue and deletes it. If that happens on a thread of the queue, in callbacks that
  /// were its last owner, this thread deletes it once they have returned.
  struct Delete {
    void operator()(CallQueue* queue) const noexcept;
  };
  using Owner = std::unique_ptr<CallQueue, Delete>;
  static Owner make() { return Owner(new CallQueue); }

  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  /// Runs what is posted, then ends the threads, but for the calling one. Nothing may be posted
  /// from then on.
  void close() noexcept;
  /// The call must not throw. It returns a completion function, or an empty one, which notifies
  /// waiters that the call has ended. That runs after the queue has counted the call as ended, so
  /// that a program that exits then has no pending call. It returns callbacks, or an empty
  /// function, which run concurrently with later calls and may wait for them: after those that are
  /// posted, if no thread can be started. Throws std::system_error if the call has no thread.
  void post(std::function<Completion()> call, const PostedCall& label);
  void wait_until_idle();
  /// Waits for `left`, and then a little longer: the limits of posted calls began earlier, and
  /// their errors name the ranks that are late. Returns the first call that is pending then.
  std::optional<PostedCall> wait_until_idle(std::chrono::nanoseconds left);
  /// Waits until one of the pending calls has ended; false: none is pending, or none has in that
  /// time.
  bool wait_for_one(std::chrono::nanoseconds at_most);
  /// Also waits until no callbacks are running.
  void wait_for_callbacks();
  /// Waits until no thread of this process is in callbacks of a queue, also of one that is gone, as
  /// Delete says. Not from callbacks.
  static void wait_for_all_callbacks();
  bool is_idle() const noexcept { return n_pending_.load(std::memory_order_acquire) == 0; }

  /// f(limit): with what the wait for posted calls has left of it. If they have not ended in time,
  /// returns the first of them.
  template <class F>
  std::optional<PostedCall> run(std::chrono::milliseconds limit, F f) {
    detail::TimeLimit left(limit);
    bool has_waited = false;
    while (true) {
      if (!is_idle()) {
        has_waited = true;
        if (const auto late = wait_until_idle(left.left())) return late;
      }
      const std::lock_guard running(running_);
      if (!is_idle()) continue;  // another thread has posted
      f(has_waited ? left.of_step() : limit);
      return {};
    }
  }

 private:
  struct Posted {
    std::function<Completion()> call;
    PostedCall label;
    Callbacks callbacks;
  };

  CallQueue() = default;
  ~CallQueue() = default;
  void start_thread();               // requires the lock
  bool try_start_thread() noexcept;  // too
  void loop();

  std::mutex running_;  // held by the thread that is in a call
  std::mutex mutex_;    // guards the members below
  std::condition_variable changed_;
  std::list<Posted> calls_;    // a thread moves them without memory
  std::list<Posted> calling_;  // the one that runs, if any; of the thread that runs it
  PostedCall current_;         // its label
  std::atomic<std::size_t> n_pending_{0};
  bool is_closing_ = false;
  bool is_left_to_thread_ = false;  // the thread in whose callbacks the last owner went
  bool is_calling_ = false;         // a thread runs a call or its completion
  int n_free_ = 0;                  // threads that are not in callbacks
  std::vector<std::thread> threads_;
};

}  // namespace lockstep::internal
