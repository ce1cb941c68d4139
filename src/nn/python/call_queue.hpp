#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep::python {

/// The calls on one group, one at a time: posted ones in their order, on a thread that the first of
/// them starts; others on the calling thread, after those posted before. In a fork of its process
/// it may not be destroyed: its threads and, perhaps, the owner of its mutex are not there.
class CallQueue {
 public:
  using Callbacks = std::function<void()>;
  using Completion = std::function<Callbacks()>;

  CallQueue() = default;
  ~CallQueue() { close(); }
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  /// Runs what is posted, then ends the thread. Nothing may be posted from then on.
  void close() noexcept;
  /// The call may not throw. It returns what tells of its end, or an empty function: that runs when
  /// the queue counts the call as ended, so that a program which ends then has none under way. And
  /// that returns what to run next, beside later calls and perhaps waiting for them, or an empty
  /// function.
  void post(std::function<Completion()> call);
  void wait_until_idle();
  /// Also until no callbacks run.
  void wait_for_callbacks();
  bool is_idle() const noexcept { return n_pending_.load(std::memory_order_acquire) == 0; }

  template <class F>
  void run(F f) {
    while (true) {
      {
        const std::lock_guard running(running_);
        if (is_idle()) return f();
      }
      wait_until_idle();
    }
  }

 private:
  void start_thread();  // requires the lock
  void loop();

  std::mutex running_;  // held by the thread that is in a call
  std::mutex mutex_;    // guards the members below
  std::condition_variable changed_;
  std::deque<std::function<Completion()>> calls_;
  std::atomic<std::size_t> n_pending_{0};
  bool is_closing_ = false;
  bool is_calling_ = false;  // one of the threads, or telling of the end
  int n_free_ = 0;           // threads that are not in callbacks
  std::vector<std::thread> threads_;
};

}  // namespace lockstep::python
