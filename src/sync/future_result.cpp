#include <fmt/format.h>

#include <lockstep/detail/time_limit.hpp>
#include <lockstep/error.hpp>
#include <lockstep/sync_master.hpp>

namespace lockstep::detail {
namespace {

constexpr std::chrono::milliseconds kTimeout = std::chrono::minutes(5);

ErrorContext context(const char* operation, std::source_location where) {
  return {.operation = operation, .group = {}, .rank = -1, .sequence = 0, .where = where};
}

}  // namespace

std::unique_lock<std::mutex> FutureGate::begin_put(std::source_location where) {
  std::unique_lock lock(mutex_);
  if (is_full_) {
    throw UsageError(context("FutureResult::put", where),
                     "a second put before a get took the first value; get it first, or use one "
                     "FutureResult per value");
  }
  return lock;
}

void FutureGate::end_put(std::unique_lock<std::mutex> lock) {
  is_full_ = true;
  filled_.notify_one();  // under the lock: as soon as it is released, a getter may destroy this
  lock.unlock();
}

std::unique_lock<std::mutex> FutureGate::get(Timeout timeout, std::source_location where) {
  const TimeLimit limit(timeout.or_else(kTimeout));
  std::unique_lock lock(mutex_);
  if (!filled_.wait_until(lock, limit.end(), [this] { return is_full_; })) {
    throw TimeoutError(context("FutureResult::get", where),
                       fmt::format("no value was put within {} ms; check the thread that should "
                                   "put it, or give a longer timeout",
                                   limit.whole().count()));
  }
  is_full_ = false;
  return lock;
}

bool FutureGate::is_full() const noexcept {
  const std::scoped_lock lock(mutex_);
  return is_full_;
}

}  // namespace lockstep::detail
