#include "base/ticks.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <vector>

namespace lockstep::base {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

/// What a global's constructor reads, before those of this library's files.
struct Early {
  Early() : anchor(now()) {}
  TickAnchor anchor;
};
[[gnu::init_priority(102)]] const Early early;

TEST(TicksTest, globals_that_are_constructed_early_read_the_same_clock) {
  const TickAnchor first = now();
  for (const auto end = steady_clock::now() + microseconds(2000); steady_clock::now() < end;) {
  }
  const TickAnchor last = now();
  const double long_ago = static_cast<double>(last.ticks - early.anchor.ticks) /
                          static_cast<double>(last.ns - early.anchor.ns);
  const double lately =
      static_cast<double>(last.ticks - first.ticks) / static_cast<double>(last.ns - first.ns);
  EXPECT_NEAR(long_ago / lately, 1, 0.05);
}

// A rank may need the scale as soon as it has joined. On a busy machine one reading of the two
// clocks in a hundred is interrupted between them.
TEST(TicksTest, a_scale_of_a_tenth_of_a_millisecond_is_exact_to_a_thousandth) {
  constexpr int kScales = 2000;
  constexpr std::chrono::seconds kLimit(300);
  const TickAnchor first = now();
  std::vector<std::uint64_t> limits;
  for (int i = 0; i < kScales; ++i) {
    const TickAnchor then = now();
    for (const auto end = steady_clock::now() + microseconds(100); steady_clock::now() < end;) {
    }
    limits.push_back(TickScale(then, now()).ticks_in(kLimit));
  }
  const auto right = static_cast<double>(TickScale(first, now()).ticks_in(kLimit));
  int n_off = 0;
  for (const std::uint64_t limit : limits) {
    if (std::abs(static_cast<double>(limit) / right - 1) > 1e-3) ++n_off;
  }
  EXPECT_LE(n_off, kScales / 500);
}

}  // namespace
}  // namespace lockstep::base
