#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep::base {

/// A class, so that it can be initialised before all globals whose constructors may call ticks().
struct TickSource {
  /// Whether ticks() reads the processor's counter, which must run at one rate on all cores.
  bool is_counter;
};
extern const TickSource kTickSource;

/// A clock that costs half as much as CLOCK_MONOTONIC and is the same for all processes of a
/// machine. Its unit depends on the machine: TickScale converts it to nanoseconds.
inline std::uint64_t ticks() noexcept {
#if defined(__x86_64__)
  if (kTickSource.is_counter) return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  std::uint64_t count = 0;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
#endif
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

/// A simultaneous reading of both clocks.
struct TickAnchor {
  std::uint64_t ticks;
  std::int64_t ns;  ///< CLOCK_MONOTONIC
};

/// Simultaneous to about ten nanoseconds, unless interrupted.
TickAnchor now() noexcept;

/// Converts ticks between two anchors, and near them, to nanoseconds of CLOCK_MONOTONIC. Accurate
/// to 1e-3 with anchors 0.1 ms apart, and to 1e-5 with 1 ms; in the long run to NTP's slew of that
/// clock, 0.05 % at most.
class TickScale {
 public:
  TickScale(const TickAnchor& then, const TickAnchor& later) noexcept;
  std::int64_t to_ns(std::uint64_t ticks) const noexcept;
  /// The number of ticks in that time.
  std::uint64_t ticks_in(std::chrono::nanoseconds time) const noexcept;

 private:
  TickAnchor later_;
  double ns_per_tick_;
};

}  // namespace lockstep::base
