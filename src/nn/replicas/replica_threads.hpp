#pragma once

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <lockstep/error.hpp>
#include <mutex>
#include <source_location>
#include <stop_token>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

namespace lockstep::nn::detail {

/// One thread per replica, asleep between rounds.
class ReplicaThreads {
 public:
  ReplicaThreads(std::size_t n, std::string_view operation, std::source_location where) {
    threads_.reserve(n);
    for (std::size_t i = 0; i < n; ++i) {
      try {
        threads_.emplace_back([this, i](const std::stop_token& stop) { work(i, stop); });
      } catch (const std::system_error& error) {
        throw SystemError(
            {std::string(operation), "", -1, 0, where}, error.code().value(),
            fmt::format("cannot start thread {} of {}; raise the limit of processes "
                        "(ulimit -u) or use fewer {}",
                        i + 1, n, operation == "DataParallel" ? "devices" : "shards"));
      }
      ::pthread_setname_np(threads_.back().native_handle(), fmt::format("replica-{}", i).c_str());
    }
  }

  /// body(i) on thread i, for i < n, and meanwhile() on this one; returns when all are done.
  /// Neither may throw.
  void run(std::size_t n, const std::function<void(std::size_t)>& body,
           const std::function<void()>& meanwhile = {}) {
    std::unique_lock lock(mutex_);
    body_ = &body;
    n_wanted_ = n_running_ = n;
    ++round_;
    start_.notify_all();
    if (meanwhile) {
      lock.unlock();
      meanwhile();
      lock.lock();
    }
    done_.wait(lock, [this] { return n_running_ == 0; });
  }

  bool is_worker_thread() const {
    return std::any_of(threads_.begin(), threads_.end(), [](const std::jthread& thread) {
      return thread.get_id() == std::this_thread::get_id();
    });
  }

 private:
  void work(std::size_t i, const std::stop_token& stop) {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (start_.wait(lock, stop, [&] { return round_ != seen; })) {
      seen = round_;
      if (i >= n_wanted_) continue;
      lock.unlock();
      (*body_)(i);
      lock.lock();
      if (--n_running_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any start_;
  std::condition_variable done_;
  std::uint64_t round_ = 0;
  std::size_t n_wanted_ = 0;
  std::size_t n_running_ = 0;
  const std::function<void(std::size_t)>* body_ = nullptr;
  std::vector<std::jthread> threads_;  // last: joined before the rest is destroyed
};

}  // namespace lockstep::nn::detail
