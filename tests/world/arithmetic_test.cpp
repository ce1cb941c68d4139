#include "world/arithmetic.hpp"

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
namespace arithmetic_test {
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

void check_of_defaults(Engine& engine, const Call& barrier) {
  internal::check_arithmetic(engine, barrier, {});
}

TEST(ArithmeticTest, equal_ranks_pass) {
  const auto errors = errors_of([](int) {}, check_of_defaults);
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(ArithmeticTest, a_rank_with_another_network_is_named) {
  const auto errors =
      errors_of([](int) {},
                [](Engine& engine, const Call& barrier) {
                  const char* const network = engine.rank() == 1 ? "2us,400Gbit" : "25us,100Gbit";
                  internal::check_arithmetic(engine, barrier, message::parse_costs(network));
                });
  for (const std::string& error : errors) {
    expect_contains(error, "LOCKSTEP_NETWORK is 25us,100Gbit on rank 0, 2us,400Gbit on rank 1");
  }
}

TEST(ArithmeticTest, a_rank_that_rounds_another_way_is_named) {
  const auto errors = errors_of(
      [](int rank) {
        if (rank == 1) std::fesetround(FE_UPWARD);
      },
      check_of_defaults);
  for (const std::string& error : errors) {
    expect_contains(error,
                    "rank 0 uses the defaults of IEEE 754, rank 1 does not round to nearest");
  }
}

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

TEST(ArithmeticTest, init_dist_compares_networks) {
  expect_mismatch_in_init_dist(
      [](int rank) {
        if (rank == 1) ::setenv("LOCKSTEP_NETWORK", "25us,100Gbit", 1);
      },
      "LOCKSTEP_NETWORK is 1.25us,25Gbit on rank 0, 25us,100Gbit on rank 1");
}

#if defined(__x86_64__)
TEST(ArithmeticTest, a_rank_that_flushes_subnormal_numbers_is_named) {
  const auto errors = errors_of(
      [](int rank) {
        if (rank == 0) _mm_setcsr(_mm_getcsr() | 0x8040U);
      },
      check_of_defaults);
  for (const std::string& error : errors) {
    expect_contains(error,
                    "rank 0 flushes subnormal results to zero (FTZ), treats subnormal operands as "
                    "zero (DAZ), rank 1 uses the defaults");
    expect_contains(error, "-ffast-math");
  }
}

TEST(ArithmeticTest, init_dist_compares_modes) {
  expect_mismatch_in_init_dist(
      [](int rank) {
        if (rank == 1) _mm_setcsr(_mm_getcsr() | 0x8000U);
      },
      "rank 1 flushes");
}
#endif

/// An engine that is wrong in one operation.
class Wrong final : public Engine {
 public:
  Wrong(Engine& engine, Op op, DType dtype) : engine_(engine), op_(op), dtype_(dtype) {}
  std::string_view name() const noexcept override { return "wrong"; }
  int rank() const noexcept override { return engine_.rank(); }
  int size() const noexcept override { return engine_.size(); }
  void run(const Call& call) override {
    engine_.run(call);
    if (call.op == op_ && call.dtype == dtype_) static_cast<std::uint8_t*>(call.out)[0] ^= 1U;
  }
  std::unique_ptr<Engine> split(const Call&, int, int) override { return nullptr; }
  std::unique_ptr<SharedMemory> allocate(const Call&) override { return nullptr; }
  void abandon(std::string_view) noexcept override {}
  void leave(std::string_view) noexcept override {}

 private:
  Engine& engine_;
  Op op_;
  DType dtype_;
};

TEST(ArithmeticTest, operations_that_compute_wrongly_are_named) {
  for (const Op op :
       {Op::all_reduce, Op::reduce_scatter, Op::all_gather, Op::all_to_all, Op::broadcast}) {
    const auto errors = errors_of([](int) {},
                                  [op](Engine& engine, const Call& barrier) {
                                    Wrong wrong(engine, op, DType::i32);
                                    internal::check_operations(wrong, barrier);
                                  });
    for (const std::string& error : errors) {
      expect_contains(error, "engine wrong computes wrongly: " + std::string(name_of(op)));
      expect_contains(error, "i32, element 0 of 19");
    }
  }
}

TEST(ArithmeticTest, operations_of_the_shared_engine_are_right_in_any_mode) {
  for (const int mode : {FE_TONEAREST, FE_DOWNWARD}) {
    const auto errors =
        errors_of([mode](int) { std::fesetround(mode); }, internal::check_operations);
    EXPECT_EQ(errors, std::vector<std::string>(2));
  }
}

}  // namespace
}  // namespace arithmetic_test
}  // namespace lockstep::internal
