#include "nn/python/call_queue.hpp"

#include <pthread.h>

#include <utility>

namespace lockstep::python {

void CallQueue::close() noexcept {
  std::unique_lock lock(mutex_);
  is_closing_ = true;
  changed_.notify_all();
  while (!threads_.empty()) {  // one may start another until its calls have ended
    std::thread thread = std::move(threads_.back());
    threads_.pop_back();
    lock.unlock();
    thread.join();
    lock.lock();
  }
}

void CallQueue::start_thread() {
  std::thread& thread = threads_.emplace_back([this] { loop(); });
  ::pthread_setname_np(thread.native_handle(), "lockstep-c10d");
  ++n_free_;
}

void CallQueue::post(std::function<Completion()> call, const internal::PostedCall& label) {
  {
    const std::lock_guard lock(mutex_);
    if (n_free_ == 0) start_thread();
    calls_.push_back({std::move(call), label});
    n_pending_.fetch_add(1, std::memory_order_relaxed);
  }
  changed_.notify_all();
}

void CallQueue::wait_until_idle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_idle(); });
}

std::optional<internal::PostedCall> CallQueue::wait_until_idle(std::chrono::nanoseconds at_most) {
  if (at_most == std::chrono::nanoseconds::max()) {  // which wait_for adds to now
    wait_until_idle();
    return {};
  }
  std::unique_lock lock(mutex_);
  if (changed_.wait_for(lock, at_most, [this] { return is_idle(); })) return {};
  return n_pending_.load(std::memory_order_relaxed) > calls_.size() ? current_
                                                                    : calls_.front().label;
}

void CallQueue::wait_for_callbacks() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] {
    return is_idle() && !is_calling_ && n_free_ == static_cast<int>(threads_.size());
  });
}

void CallQueue::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !is_calling_ && (is_closing_ || !calls_.empty()); });
    if (calls_.empty()) return;
    std::function<Completion()> call = std::move(calls_.front().call);
    current_ = calls_.front().label;
    calls_.pop_front();
    is_calling_ = true;
    lock.unlock();
    Completion completion;
    {
      const std::lock_guard running(running_);
      completion = call();
    }
    call = nullptr;
    n_pending_.fetch_sub(1, std::memory_order_release);
    Callbacks callbacks = completion ? completion() : Callbacks();
    completion = nullptr;
    lock.lock();
    is_calling_ = false;
    changed_.notify_all();
    if (!callbacks) continue;
    --n_free_;
    if (n_free_ == 0 && !calls_.empty()) start_thread();
    lock.unlock();
    callbacks();
    callbacks = nullptr;
    lock.lock();
    ++n_free_;
    changed_.notify_all();
  }
}

}  // namespace lockstep::python
