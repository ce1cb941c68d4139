#include "base/ticks.hpp"

#include <cstdint>
#include <limits>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lockstep::base {
namespace {

bool has_steady_counter() noexcept {
#if defined(__x86_64__)
  constexpr unsigned kPowerLeaf = 0x80000007;
  constexpr unsigned kInvariant = 1U << 8U;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(kPowerLeaf, &a, &b, &c, &d) != 0 && (d & kInvariant) != 0;
#else
  return true;
#endif
}

std::int64_t monotonic_ns() noexcept {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

}  // namespace

[[gnu::init_priority(101)]] const TickSource kTickSource{.is_counter = has_steady_counter()};

TickAnchor now() noexcept {
  // A thread may be preempted between the two clock reads: use the closest pair of a few.
  constexpr int kReadings = 3;
  TickAnchor closest{};
  std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
  for (int i = 0; i < kReadings; ++i) {
    const std::uint64_t before = ticks();
    const std::int64_t ns = monotonic_ns();
    const std::uint64_t distance = ticks() - before;
    if (distance >= least) continue;
    least = distance;
    closest = {.ticks = before + distance / 2, .ns = ns};
  }
  return closest;
}

TickScale::TickScale(const TickAnchor& then, const TickAnchor& later) noexcept : later_(later) {
  const auto n_ticks = static_cast<double>(later.ticks - then.ticks);
  ns_per_tick_ = later.ticks > then.ticks ? static_cast<double>(later.ns - then.ns) / n_ticks : 0;
}

std::int64_t TickScale::to_ns(std::uint64_t ticks) const noexcept {
  const auto back = static_cast<double>(static_cast<std::int64_t>(later_.ticks - ticks));
  return later_.ns - static_cast<std::int64_t>(back * ns_per_tick_);
}

std::uint64_t TickScale::ticks_in(std::chrono::nanoseconds time) const noexcept {
  return ns_per_tick_ > 0 && time.count() > 0
             ? static_cast<std::uint64_t>(static_cast<double>(time.count()) / ns_per_tick_)
             : 0;
}

}  // namespace lockstep::base
