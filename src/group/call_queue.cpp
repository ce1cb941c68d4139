#include "group/call_queue.hpp"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

#include "base/fork_guard.hpp"
#include "base/patience.hpp"
#include "base/text.hpp"
#include "base/wait_until_true.hpp"

namespace lockstep::internal {
namespace {

/// How many threads are in callbacks, of any queue.
struct InCallbacks {
  base::ForkGuard process;
  std::mutex mutex;
  std::condition_variable changed;
  int n = 0;
};

/// Of this process: a fork has none of these threads.
InCallbacks& in_callbacks() {
  static std::atomic<InCallbacks*> known{nullptr};
  InCallbacks* found = known.load(std::memory_order_acquire);
  if (found != nullptr && !found->process.is_forked_child()) return *found;
  auto* const mine = new InCallbacks;
  return known.compare_exchange_strong(found, mine) ? *mine : *found;
}

void count_in_callbacks(int difference) {
  InCallbacks& all = in_callbacks();
  const std::lock_guard lock(all.mutex);
  all.n += difference;
  all.changed.notify_all();
}

}  // namespace

std::string PostedCall::waited_for(int rank, double limit_s) const {
  return fmt::format("rank {} waited {:g} s for its own {}, posted at {}:{}, which has not ended",
                     rank, limit_s, operation, base::base_name(where.file_name()), where.line());
}

void CallQueue::Delete::operator()(CallQueue* queue) const noexcept {
  queue->close();
  if (queue->threads_.empty()) {
    delete queue;
  } else {
    queue->threads_.front().detach();
    queue->is_left_to_thread_ = true;
  }
}

void CallQueue::close() noexcept {
  std::unique_lock lock(mutex_);
  is_closing_ = true;
  changed_.notify_all();
  const auto is_other = [](const std::thread& thread) {
    return thread.get_id() != std::this_thread::get_id();
  };
  while (true) {  // one may start another until its calls have ended
    const auto other = std::ranges::find_if(threads_, is_other);
    if (other == threads_.end()) return;
    std::thread thread = std::move(*other);
    threads_.erase(other);
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

bool CallQueue::try_start_thread() noexcept try {
  start_thread();
  return true;
} catch (const std::exception&) {
  return false;
}

void CallQueue::post(std::function<Completion()> call, const PostedCall& label) {
  {
    const std::lock_guard lock(mutex_);
    if (n_free_ == 0) start_thread();
    calls_.push_back({std::move(call), label, {}});
    n_pending_.fetch_add(1, std::memory_order_relaxed);
  }
  changed_.notify_all();
}

void CallQueue::wait_until_idle() {
  std::unique_lock lock(mutex_);
  base::wait_until_true(changed_, lock, [this] { return is_idle() && !is_calling_; });
}

std::optional<PostedCall> CallQueue::wait_until_idle(std::chrono::nanoseconds left) {
  constexpr auto kMax = std::chrono::nanoseconds::max() / 2;  // it is added to now
  if (left >= kMax) {
    wait_until_idle();
    return {};
  }
  std::unique_lock lock(mutex_);
  const auto end = detail::JobClock::now() + left + base::patience::kLeadersReport;
  if (changed_.wait_until(lock, end, [this] { return is_idle() && !is_calling_; })) {
    return {};
  }
  const std::size_t n = n_pending_.load(std::memory_order_relaxed);
  if (n == 0) return {};  // the last one has ended since
  return n > calls_.size() ? current_ : calls_.front().label;
}

bool CallQueue::wait_for_one(std::chrono::nanoseconds at_most) {
  std::unique_lock lock(mutex_);
  const std::size_t n = n_pending_.load(std::memory_order_relaxed);
  return n > 0 && changed_.wait_until(lock, detail::JobClock::now() + at_most, [this, n] {
    return n_pending_.load(std::memory_order_relaxed) < n;
  });
}

void CallQueue::wait_for_callbacks() {
  std::unique_lock lock(mutex_);
  base::wait_until_true(changed_, lock, [this] {
    return is_idle() && !is_calling_ && n_free_ == static_cast<int>(threads_.size());
  });
}

void CallQueue::wait_for_all_callbacks() {
  InCallbacks& all = in_callbacks();
  std::unique_lock lock(all.mutex);
  base::wait_until_true(all.changed, lock, [&all] { return all.n == 0; });
}

void CallQueue::loop() {
  std::list<Posted> ended;  // with callbacks
  std::unique_lock lock(mutex_);
  while (true) {
    base::wait_until_true(changed_, lock, [&] {
      return !is_calling_ && (is_closing_ || !calls_.empty() || !ended.empty());
    });
    if (!calls_.empty()) {
      calling_.splice(calling_.end(), calls_, calls_.begin());
      Posted& posted = calling_.front();
      current_ = posted.label;
      is_calling_ = true;
      lock.unlock();
      Completion completion;
      {
        const std::lock_guard running(running_);
        completion = posted.call();
      }
      posted.call = nullptr;
      // Release: a thread that sees the queue idle may use the engine.
      n_pending_.fetch_sub(1, std::memory_order_release);
      if (completion) posted.callbacks = completion();
      completion = nullptr;
      if (posted.callbacks) {
        ended.splice(ended.end(), calling_);
      } else {
        calling_.clear();
      }
      lock.lock();
      is_calling_ = false;
      changed_.notify_all();
    } else if (ended.empty()) {
      return;
    }
    // They may wait for later calls, which therefore come first if they have no other thread.
    if (ended.empty() || (n_free_ == 1 && !calls_.empty() && !try_start_thread())) continue;
    --n_free_;
    lock.unlock();
    count_in_callbacks(+1);
    for (Posted& posted : ended) posted.callbacks();
    ended.clear();
    const bool is_left = is_left_to_thread_;
    if (is_left) delete this;
    count_in_callbacks(-1);
    if (is_left) return;
    lock.lock();
    ++n_free_;
    changed_.notify_all();
  }
}

}  // namespace lockstep::internal
