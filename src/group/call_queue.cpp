#include "group/call_queue.hpp"

#include <fmt/format.h>
#include <pthread.h>

#include <utility>

#include "base/text.hpp"
#include "base/wait_until_true.hpp"

namespace lockstep::internal {
namespace {

/// How much longer than its own limit a call waits for posted ones before it: they check every few
/// milliseconds, and between hosts they have a second more.
constexpr std::chrono::milliseconds kReportTime{2000};

}  // namespace

std::string PostedCall::waited_for(int rank, double limit_s) const {
  return fmt::format("rank {} waited {:g} s for its own {}, posted at {}:{}, which has not ended",
                     rank, limit_s, operation, base::base_name(where.file_name()), where.line());
}

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
  ::pthread_setname_np(thread.native_handle(), "lockstep-comm");
  ++n_free_;
}

void CallQueue::post(std::function<Completion()> call, const PostedCall& label) {
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
  base::wait_until_true(changed_, lock, [this] { return is_idle() && !is_calling_; });
}

std::optional<PostedCall> CallQueue::wait_until_idle(std::chrono::nanoseconds left) {
  constexpr auto kMax = std::chrono::nanoseconds::max() / 2;  // wait_for adds it to now
  if (left >= kMax) {
    wait_until_idle();
    return {};
  }
  std::unique_lock lock(mutex_);
  if (changed_.wait_for(lock, left + kReportTime, [this] { return is_idle() && !is_calling_; })) {
    return {};
  }
  const std::size_t n = n_pending_.load(std::memory_order_relaxed);
  if (n == 0) return {};  // the last one has ended since
  return n > calls_.size() ? current_ : calls_.front().label;
}

bool CallQueue::wait_for_one(std::chrono::nanoseconds at_most) {
  std::unique_lock lock(mutex_);
  const std::size_t n = n_pending_.load(std::memory_order_relaxed);
  return n > 0 && changed_.wait_for(lock, at_most, [this, n] {
    return n_pending_.load(std::memory_order_relaxed) < n;
  });
}

void CallQueue::wait_for_callbacks() {
  std::unique_lock lock(mutex_);
  base::wait_until_true(changed_, lock, [this] {
    return is_idle() && !is_calling_ && n_free_ == static_cast<int>(threads_.size());
  });
}

void CallQueue::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    base::wait_until_true(changed_, lock,
                          [this] { return !is_calling_ && (is_closing_ || !calls_.empty()); });
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
    // Release: a thread that sees the queue idle may use the engine.
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

}  // namespace lockstep::internal
