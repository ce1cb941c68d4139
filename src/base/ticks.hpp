#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep::base {

/// Whether ticks() reads the processor's own counter: where it runs at one speed on all cores.
extern const bool kHasTickCounter;

/// A clock that costs half of what CLOCK_MONOTONIC does and means the same to all processes of a
/// machine. Its unit is the machine's: TickScale turns it into nanoseconds.
inline std::uint64_t ticks() noexcept {
#if defined(__x86_64__)
  if (kHasTickCounter) return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  std::uint64_t count = 0;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
#endif
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

/// One moment on both clocks.
struct TickAnchor {
  std::uint64_t ticks;
  std::int64_t ns;  ///< CLOCK_MONOTONIC
};

/// As close together as an interruption lets it: to some ten nanoseconds.
TickAnchor now() noexcept;

/// Turns ticks between two anchors, and near them, into nanoseconds of CLOCK_MONOTONIC. With
/// anchors 0.1 ms apart to a thousandth, and 1 ms apart to a hundred-thousandth; in the long run to
/// what NTP slews that clock by, 0.05 % at most.
class TickScale {
 public:
  TickScale(const TickAnchor& then, const TickAnchor& later) noexcept;
  std::int64_t to_ns(std::uint64_t ticks) const noexcept;
  /// The ticks that so many nanoseconds take.
  std::uint64_t ticks_in(std::chrono::nanoseconds time) const noexcept;

 private:
  TickAnchor later_;
  double ns_per_tick_;
};

}  // namespace lockstep::base
