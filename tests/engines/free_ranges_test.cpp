#include "engines/shared/segment/free_ranges.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

namespace lockstep::shared {
namespace {

class FreeRangesTest : public testing::Test {
 protected:
  std::size_t n_entries() const {
    std::size_t n = 0;
    for (const auto& entry : entries_) n += entry.load() != 0 ? 1 : 0;
    return n;
  }

  FreeRanges::Entries entries_{};
  FreeRanges ranges_{entries_};
};

TEST_F(FreeRangesTest, the_smallest_that_fits_is_taken) {
  EXPECT_EQ(ranges_.take(1), std::nullopt);
  ranges_.put({.first = 10, .n = 8});
  ranges_.put({.first = 30, .n = 4});
  EXPECT_EQ(ranges_.take(9), std::nullopt);
  EXPECT_EQ(ranges_.take(3), 30U);
  EXPECT_EQ(ranges_.take(8), 10U);
  EXPECT_EQ(ranges_.take(1), 33U);  // what was left of the first
  EXPECT_EQ(n_entries(), 0U);
}

TEST_F(FreeRangesTest, neighbours_become_one) {
  ranges_.put({.first = 10, .n = 5});
  ranges_.put({.first = 20, .n = 5});
  ranges_.put({.first = 15, .n = 5});
  EXPECT_EQ(n_entries(), 1U);
  EXPECT_EQ(ranges_.take(15), 10U);
}

TEST_F(FreeRangesTest, more_than_there_are_entries_are_forgotten) {
  for (std::uint32_t i = 0; i < 2 * kFreeRanges; ++i) ranges_.put({.first = 2 * i + 2, .n = 1});
  EXPECT_EQ(n_entries(), kFreeRanges);
}

TEST_F(FreeRangesTest, no_page_is_given_to_two) {
  constexpr std::uint32_t kPages = 512;
  ranges_.put({.first = 1, .n = kPages});
  std::array<std::atomic<int>, kPages + 1> n_owners{};
  const auto work = [&](unsigned seed) {
    std::minstd_rand random(seed);
    std::vector<FreeRanges::Pages> mine;
    const auto put_last = [&] {
      const FreeRanges::Pages pages = mine.back();
      mine.pop_back();
      for (std::uint32_t i = 0; i < pages.n; ++i) --n_owners[pages.first + i];
      ranges_.put(pages);
    };
    for (int i = 0; i < 20'000; ++i) {
      if (const auto n = static_cast<std::uint32_t>(random() % 8 + 1); random() % 2 == 0) {
        const auto first = ranges_.take(n);
        if (!first) continue;
        for (std::uint32_t page = *first; page < *first + n; ++page) EXPECT_EQ(++n_owners[page], 1);
        mine.push_back({.first = *first, .n = n});
      } else if (!mine.empty()) {
        put_last();
      }
    }
    while (!mine.empty()) put_last();
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) threads.emplace_back(work, seed);
  for (auto& thread : threads) thread.join();
  std::uint32_t n_free = 0;
  for (const auto& entry : entries_) n_free += static_cast<std::uint32_t>(entry.load());
  EXPECT_EQ(n_free, kPages);
}

}  // namespace
}  // namespace lockstep::shared
