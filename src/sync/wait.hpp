#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace lockstep::detail {

/// The instant a call must have ended by.
class Expiry {
 public:
  explicit Expiry(std::chrono::milliseconds limit);
  /// Zero once it has passed; nanoseconds::max() where there is no limit.
  std::chrono::nanoseconds left() const;

 private:
  std::chrono::steady_clock::time_point end_;
};

/// How long the waits of some threads that work together spin before they sleep. It halves where
/// spinning was in vain (long waits; cores taken by others) and doubles where it was not.
class SpinTime {
 public:
  /// Whether word != seen within the time.
  bool spin(const std::atomic<std::uint32_t>& word, std::uint32_t seen);

 private:
  static constexpr std::uint32_t kLongestNs = 16'000;  // about what sleep and wake-up cost
  static constexpr std::uint32_t kShortestNs = 500;    // still finds out when spinning pays again
  std::atomic<std::uint32_t> time_ns_ = kLongestNs;
};

/// Returns when word != seen (true) or at expiry (false). Spins first where the process may use at
/// least `n_threads` cores, since the thread waited for can then run meanwhile.
bool wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                     const Expiry& expiry, SpinTime& spin_time, std::size_t n_threads);

}  // namespace lockstep::detail
