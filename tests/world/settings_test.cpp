#include "world/settings.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cfenv>
#include <cstdlib>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <thread>

#include "engines/shared/bootstrap/job.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "support/expect.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace lockstep::internal {
namespace settings_test {
namespace {

using test::expect_contains;

/// Runs body(engine, barrier) on 2 threads, before which `set` has set each one's processor;
/// returns the texts of what they threw.
template <class Set, class Body>
std::vector<std::string> errors_of(Set set, Body body) {
  const auto segment = shared::make_world(shared::Segment::for_threads(2));
  std::vector<std::string> errors(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const Call barrier{.op = Op::barrier,
                         .group = "world",
                         .sequence = 1,
                         .timeout = std::chrono::minutes(1),
                         .where = std::source_location::current()};
      const auto engine = shared::join_world(segment, rank, barrier);
      set(rank);
      try {
        body(*engine, barrier);
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void compare_defaults(Engine& engine, const Call& barrier) {
  internal::compare_settings(engine, barrier);
}

TEST(SettingsTest, equal_ranks_pass) {
  const auto errors = errors_of([](int) {}, compare_defaults);
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(SettingsTest, a_rank_that_rounds_another_way_is_named) {
  const auto errors = errors_of(
      [](int rank) {
        if (rank == 1) std::fesetround(FE_UPWARD);
      },
      compare_defaults);
  for (const std::string& error : errors) {
    expect_contains(error,
                    "rank 0 uses the defaults of IEEE 754, rank 1 does not round to nearest");
  }
}

#if defined(__x86_64__)
/// Two processes that call init_dist after `change` and expect a MismatchError with `text`.
void expect_mismatch_in_init_dist(const std::function<void(int rank)>& change, const char* text) {
  shared::Job job(2);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 2; ++rank) {
    std::fflush(nullptr);
    pids.push_back(::fork());
    if (pids.back() != 0) continue;
    ::setenv("RANK", std::to_string(rank).c_str(), 1);
    ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
    ::setenv("WORLD_SIZE", "2", 1);
    ::setenv("LOCAL_WORLD_SIZE", "2", 1);
    ::setenv("LOCKSTEP_SEGMENT", job.environment().c_str(), 1);
    change(rank);
    try {
      init_dist({.timeout = std::chrono::minutes(1)});
    } catch (const MismatchError& error) {
      ::_exit(std::string(error.what()).find(text) != std::string::npos ? 3 : 4);
    }
    ::_exit(5);
  }
  for (const pid_t pid : pids) {
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 3 << 8);
  }
}

TEST(SettingsTest, a_rank_that_flushes_subnormal_numbers_is_named) {
  const auto errors = errors_of(
      [](int rank) {
        if (rank == 0) _mm_setcsr(_mm_getcsr() | 0x8040U);
      },
      compare_defaults);
  for (const std::string& error : errors) {
    expect_contains(error,
                    "rank 0 flushes subnormal results to zero (FTZ), treats subnormal operands as "
                    "zero (DAZ), rank 1 uses the defaults");
    expect_contains(error, "-ffast-math");
  }
}

TEST(SettingsTest, init_dist_compares_modes) {
  expect_mismatch_in_init_dist(
      [](int rank) {
        if (rank == 1) _mm_setcsr(_mm_getcsr() | 0x8000U);
      },
      "rank 1 flushes");
}
#endif

TEST(SettingsTest, operations_of_ranks_that_round_alike_do_so_in_any_mode) {
  for (const int mode : {FE_TONEAREST, FE_DOWNWARD}) {
    run_ranks(2, [mode](int rank) {
      std::fesetround(mode);
      constexpr std::size_t kCount = 19;  // more than one SIMD vector, plus a remainder
      const auto value = [](int r, std::size_t i) {
        return 0.1F * static_cast<float>(r + 1) + static_cast<float>(i);
      };
      std::vector<float> sums, means;
      for (std::size_t i = 0; i < kCount; ++i) sums.push_back(value(rank, i));
      means = sums;
      all_reduce(std::span(sums));
      all_reduce(std::span(means), ReduceOp::mean);
      for (std::size_t i = 0; i < kCount; ++i) {
        const volatile float first = value(0, i);  // added here, in this thread's mode
        const volatile float second = value(1, i);
        EXPECT_EQ(sums[i], first + second);
        EXPECT_EQ(means[i], (first + second) / 2);
      }
      std::fesetround(FE_TONEAREST);
    });
  }
}

}  // namespace
}  // namespace settings_test
}  // namespace lockstep::internal
