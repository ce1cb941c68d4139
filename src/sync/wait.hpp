#pragma once

#include <atomic>
#include <chrono>
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

/// Returns when word != seen (true) or at expiry (false). Spins a little first where the process
/// may use at least `n_threads` cores, since the thread waited for can then run meanwhile.
bool wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                     const Expiry& expiry, std::size_t n_threads);

}  // namespace lockstep::detail
