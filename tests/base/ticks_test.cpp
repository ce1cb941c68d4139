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

// A rank may need the scale as soon as it has joined. On a busy machine one look at the two clocks
// in a hundred has an interruption between them.
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
