#include "nn/python/call_queue.hpp"

#include <pthread.h>

#include <utility>

namespace lockstep::python {

void CallQueue::close() noexcept {
  if (process_.is_copy()) {  // a fork has neither the thread nor, perhaps, the mutex
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void CallQueue::post(std::function<void()> call) {
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { loop(); });
      ::pthread_setname_np(thread_.native_handle(), "lockstep-c10d");
    }
    calls_.push_back(std::move(call));
    n_pending_.fetch_add(1, std::memory_order_relaxed);
  }
  changed_.notify_all();
}

void CallQueue::wait_until_idle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_idle(); });
}

void CallQueue::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_closing_ || !calls_.empty(); });
    if (calls_.empty()) return;
    std::function<void()> call = std::move(calls_.front());
    calls_.pop_front();
    lock.unlock();
    {
      const std::lock_guard running(running_);
      call();
    }
    call = nullptr;
    lock.lock();
    n_pending_.fetch_sub(1, std::memory_order_release);
    changed_.notify_all();
  }
}

}  // namespace lockstep::python
