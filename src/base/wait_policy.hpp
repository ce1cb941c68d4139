#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep::base {

/// How a thread waits for others before it sleeps: it polls, then yields its core before each poll.
/// How it sleeps is the waiter's own.
///
/// If each thread has a core, the one that is awaited is running now: a poll costs less than a
/// sleep, and a wake-up takes longer than most threads are late, especially on a virtual core. A
/// core that is yielded to another program returns only when the scheduler decides. If there are
/// more threads than cores (oversubscribed), every poll may keep the awaited one from running.
struct WaitPolicy {
  bool is_oversubscribed;
  std::uint32_t n_polls;   ///< before the first yield
  std::uint32_t n_yields;  ///< at most
  /// How long the yields may last or, if n_yields is 0, the polls: a limit of time beside that of
  /// number, because one yield to busy programs takes milliseconds.
  std::chrono::nanoseconds at_most;

  static constexpr std::uint32_t kAnyNumber = UINT32_MAX;
  static constexpr std::chrono::nanoseconds kAnyTime = std::chrono::nanoseconds::max();

  /// For n ranks that may together use n_cores, and whose poll is a few loads. Even with a core
  /// each they yield, to other threads, such as those of their other groups.
  static constexpr WaitPolicy of_flags(int n, int n_cores) noexcept {
    constexpr std::chrono::microseconds kYieldTime{1500};
    return n > n_cores ? WaitPolicy{true, 0, 100, kYieldTime}
                       : WaitPolicy{false, 4'000, kAnyNumber, kYieldTime};
  }
  /// The same if a poll is a test of messages by a library, which may itself yield.
  static constexpr WaitPolicy of_messages(int n, int n_cores) noexcept {
    return n > n_cores ? WaitPolicy{true, 500, 100'000, kAnyTime}
                       : WaitPolicy{false, 20'000, 100'000, kAnyTime};
  }
  /// Of n threads of one process, which polls at most for about the cost of a sleep and a wake-up.
  static constexpr WaitPolicy of_threads(int n, int n_cores) noexcept {
    return n > n_cores ? WaitPolicy{true, 0, 0, std::chrono::nanoseconds(0)}
                       : WaitPolicy{false, kAnyNumber, 0, std::chrono::microseconds(16)};
  }
};

}  // namespace lockstep::base
