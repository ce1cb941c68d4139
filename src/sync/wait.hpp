#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <lockstep/detail/time_limit.hpp>

#include "base/wait_policy.hpp"

namespace lockstep::detail {

/// How long the waits of cooperating threads spin before they sleep. It halves when spinning was in
/// vain (long waits; cores taken by others) and doubles when it succeeded.
class SpinTime {
 public:
  /// Whether word != seen became true within the time.
  bool spin(const std::atomic<std::uint32_t>& word, std::uint32_t seen);

 private:
  static constexpr std::uint32_t kLongestNs = static_cast<std::uint32_t>(
      base::WaitPolicy::of_threads(/*n=*/1, /*n_cores=*/1).at_most.count());
  static constexpr std::uint32_t kShortestNs = 500;  // still detects when spinning pays again
  std::atomic<std::uint32_t> time_ns_ = kLongestNs;
};

/// Returns when word != seen (true) or at the limit (false). Spins first if the process may use at
/// least `n_threads` cores, because the awaited thread can run meanwhile.
bool wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                     detail::TimeLimit& limit, SpinTime& spin_time, std::size_t n_threads);

}  // namespace lockstep::detail
