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

std::shared_ptr<WorkState> Worker::post(std::function<void()> task) {
  auto state = std::make_shared<WorkState>();
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back({std::move(task), state});
    n_pending_.fetch_add(1, std::memory_order_relaxed);
  }
  changed_.notify_all();
  return state;
}

void Worker::wait_until_idle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return n_pending_.load(std::memory_order_relaxed) == 0; });
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
    }
    std::exception_ptr error;
    try {
      task.run();
    } catch (...) {
      error = std::current_exception();
    }
    task.state->finish(std::move(error));
    {
      const std::lock_guard lock(mutex_);
      // Release: a thread that sees the worker idle may use the engine.
      n_pending_.fetch_sub(1, std::memory_order_release);
    }
    changed_.notify_all();
  }
}

}  // namespace lockstep::internal
