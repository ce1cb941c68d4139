#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

#include <lockstep/types.hpp>

namespace lockstep::detail {

/// The clock of limits: steady_clock, but it stands while `lockstep run` has stopped the whole job
/// (Ctrl-Z). A process sees that once it has called init_dist.
struct JobClock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<JobClock>;
  static constexpr bool is_steady = true;
  static time_point now() noexcept;
};

/// The time limit of one call, which its steps share. It begins at the first query, so that a call
/// that hardly waits does not read the clock.
/// Threads: one at a time.
class TimeLimit {
 public:
  using Clock = JobClock;

  /// By default there is none.
  explicit TimeLimit(std::chrono::milliseconds limit = std::chrono::milliseconds::max())
      : limit_(limit) {}
  /// For a function that consists of several collectives; its time starts now. Without a limit from
  /// the caller the function has none, and each collective has the group's timeout.
  explicit TimeLimit(Timeout limit) : TimeLimit(limit.or_else(std::chrono::milliseconds::max())) {
    if (limit.is_given()) static_cast<void>(end());
  }

  std::chrono::milliseconds whole() const { return limit_; }

  /// Clock::time_point::max() if the clock's range has no such time.
  Clock::time_point end() const {
    if (!end_) {
      const auto now = Clock::now();
      // In milliseconds, in which no limit overflows.
      const auto longest =
          std::chrono::duration_cast<std::chrono::milliseconds>(Clock::time_point::max() - now);
      end_ = limit_ >= longest ? Clock::time_point::max() : now + limit_;
    }
    return *end_;
  }
  /// Zero once it has passed; nanoseconds::max() if there is no end.
  std::chrono::nanoseconds left() const {
    if (end() == Clock::time_point::max()) return std::chrono::nanoseconds::max();
    return std::max<std::chrono::nanoseconds>(end() - Clock::now(), {});
  }
  bool is_over() const { return left() == std::chrono::nanoseconds::zero(); }
  /// The remaining time, as the limit of a step of the call: at least a millisecond (unless the
  /// entire limit is less), so that a step can still receive what has arrived.
  std::chrono::milliseconds of_step() const {
    using std::chrono::milliseconds;
    const std::chrono::nanoseconds left = this->left();
    if (left == std::chrono::nanoseconds::max()) return limit_;
    return std::max(std::chrono::ceil<milliseconds>(left), std::min(limit_, milliseconds(1)));
  }
  /// The same, as the timeout of one collective of the function.
  Timeout timeout() const {
    return limit_ == std::chrono::milliseconds::max() ? Timeout() : Timeout(of_step());
  }

 private:
  std::chrono::milliseconds limit_;
  mutable std::optional<Clock::time_point> end_;
};

}  // namespace lockstep::detail
