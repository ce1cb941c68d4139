#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

namespace lockstep::base {

/// The time limit of one call. It begins at the first query, so that a call that hardly waits does
/// not read the clock.
class TimeLimit {
 public:
  using Clock = std::chrono::steady_clock;

  /// By default there is none.
  explicit TimeLimit(std::chrono::milliseconds limit = std::chrono::milliseconds::max())
      : limit_(limit) {}

  std::chrono::milliseconds whole() const { return limit_; }

  /// Clock::time_point::max() if the clock's range has no such time.
  Clock::time_point end() {
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
  std::chrono::nanoseconds left() {
    if (end() == Clock::time_point::max()) return std::chrono::nanoseconds::max();
    return std::max<std::chrono::nanoseconds>(end() - Clock::now(), {});
  }
  bool is_over() { return left() == std::chrono::nanoseconds::zero(); }
  /// What is left, as the limit of a step of the call: at least a millisecond (unless the whole has
  /// less), in which a step finds what has arrived.
  std::chrono::milliseconds of_step() {
    using std::chrono::milliseconds;
    const std::chrono::nanoseconds left = this->left();
    if (left == std::chrono::nanoseconds::max()) return limit_;
    return std::max(std::chrono::ceil<milliseconds>(left), std::min(limit_, milliseconds(1)));
  }

 private:
  std::chrono::milliseconds limit_;
  std::optional<Clock::time_point> end_;
};

}  // namespace lockstep::base
