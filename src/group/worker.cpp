#include "group/worker.hpp"

#include <pthread.h>

#include <utility>

namespace lockstep::internal {

void WorkState::wait_until_done() noexcept {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return is_done_; });
}

void WorkState::wait() {
  wait_until_done();
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

bool WorkState::done() const {
  const std::lock_guard lock(mutex_);
  return is_done_;
}

void WorkState::finish(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    is_done_ = true;
  }
  finished_.notify_all();
}

Worker::Worker() : thread_([this] { loop(); }) {
  ::pthread_setname_np(thread_.native_handle(), "lockstep-comm");
}

Worker::~Worker() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::shared_ptr<WorkState> Worker::post(std::function<void()> task, const PostedCall& call) {
  auto state = std::make_shared<WorkState>();
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back({std::move(task), state, call});
    n_pending_.fetch_add(1, std::memory_order_relaxed);
  }
  changed_.notify_all();
  return state;
}

void Worker::wait_until_idle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return n_pending_.load(std::memory_order_relaxed) == 0; });
}

std::optional<PostedCall> Worker::wait_until_idle(std::chrono::nanoseconds at_most) {
  if (at_most == std::chrono::nanoseconds::max()) {  // which wait_for adds to now
    wait_until_idle();
    return {};
  }
  std::unique_lock lock(mutex_);
  if (changed_.wait_for(lock, at_most,
                        [this] { return n_pending_.load(std::memory_order_relaxed) == 0; })) {
    return {};
  }
  return n_pending_.load(std::memory_order_relaxed) > tasks_.size() ? current_
                                                                    : tasks_.front().call;
}

bool Worker::wait_for_one(std::chrono::nanoseconds at_most) {
  std::unique_lock lock(mutex_);
  const std::size_t n = n_pending_.load(std::memory_order_relaxed);
  return n > 0 && changed_.wait_for(lock, at_most, [this, n] {
    return n_pending_.load(std::memory_order_relaxed) < n;
  });
}

void Worker::loop() {
  for (;;) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return is_closing_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
      current_ = task.call;
    }
    std::exception_ptr error;
    try {
      task.run();
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      // Release: a thread that sees the worker idle may use the engine. First: who has waited for
      // the last task sees it idle, and a program that ends then has no call under way.
      n_pending_.fetch_sub(1, std::memory_order_release);
      task.state->finish(std::move(error));
    }
    changed_.notify_all();
  }
}

}  // namespace lockstep::internal
