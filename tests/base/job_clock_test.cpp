#include "base/job_clock.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>

#include "base/fd.hpp"

namespace lockstep::base {
namespace {

using std::chrono::nanoseconds;

nanoseconds difference() {
  const nanoseconds job = job_time();  // first, so that the difference is not too small
  return std::chrono::steady_clock::now().time_since_epoch() - job;
}

/// In a process of its own, because a process has one clock. It follows no segment, as another test
/// may have done.
template <class Check>
void expect_in_process(const Check& check) {
  const auto follow_none_and_check = [&check] {
    follow_job_clock(/*fd=*/-1, /*offset=*/0);
    return check();
  };
  EXPECT_EXIT(std::exit(follow_none_and_check() ? 0 : 1), testing::ExitedWithCode(0), "");
}

TEST(JobClockTest, stands_while_the_job_is_stopped) {
  expect_in_process([] {
    const nanoseconds before = job_time();
    const std::int64_t word = stop_job_clock();
    const nanoseconds stopped = job_time();
    usleep(10'000);
    bool is_right = stopped >= before && word == -stopped.count() && job_time() == stopped;
    const std::int64_t continued = continue_job_clock();
    is_right = is_right && continued >= 10'000'000 && continued == job_clock_word() &&
               job_time() >= stopped && difference().count() >= continued;
    stop_job_clock();
    usleep(10'000);
    return is_right && continue_job_clock() >= continued + 10'000'000;
  });
}

TEST(JobClockTest, follows_a_word_of_shared_memory_and_then_another) {
  expect_in_process([] {
    constexpr std::size_t kOffset = 4096 + 64;
    const auto make = [](std::int64_t word) {
      UniqueFd memory(memfd_create("clock", MFD_CLOEXEC));
      pwrite(memory.get(), &word, sizeof word, kOffset);
      if (ftruncate(memory.get(), 8192) != 0) std::exit(2);
      return memory;
    };
    const UniqueFd first = make(5'000'000'000);
    follow_job_clock(first.get(), kOffset);
    bool is_right = difference() >= std::chrono::seconds(5);
    std::int64_t word = -7;
    pwrite(first.get(), &word, sizeof word, kOffset);
    is_right = is_right && job_time() == nanoseconds(7);
    {
      const UniqueFd second = make(-9);
      follow_job_clock(second.get(), kOffset);
    }
    is_right = is_right && job_time() == nanoseconds(9);
    follow_job_clock(/*fd=*/-1, kOffset);
    return is_right && difference() < std::chrono::seconds(5);
  });
}

}  // namespace
}  // namespace lockstep::base
