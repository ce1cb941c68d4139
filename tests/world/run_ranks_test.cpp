#include <gtest/gtest.h>

#include <atomic>
#include <exception>
#include <lockstep/lockstep.hpp>
#include <stdexcept>

namespace lockstep {
namespace {

TEST(RunRanksTest, every_rank_has_its_own_default_group) {
  std::atomic<int> sum = 0;
  run_ranks(4, [&](int rank) {
    EXPECT_TRUE(is_distributed());
    EXPECT_EQ(get_rank(), rank);
    EXPECT_EQ(get_local_rank(), rank);
    EXPECT_EQ(get_world_size(), 4);
    EXPECT_EQ(get_local_size(), 4);
    EXPECT_EQ(get_backend(), "shared");
    EXPECT_EQ(is_main_process(), rank == 0);
    sum += rank;
  });
  EXPECT_EQ(sum, 6);
  EXPECT_FALSE(is_distributed());
}

TEST(RunRanksTest, less_than_one_rank) {
  EXPECT_THROW(run_ranks(0, [] {}), UsageError);
  EXPECT_THROW(run_ranks(-1, [] {}), UsageError);
}

TEST(RunRanksTest, more_ranks_than_a_machine_takes) {
  EXPECT_THROW(run_ranks(513, [] {}), UsageError);
}

TEST(RunRanksTest, worlds_within_worlds) {
  run_ranks(2, [] {
    run_ranks(3, [] { EXPECT_EQ(all_reduce_value(1), 3); });
    EXPECT_EQ(all_reduce_value(1), 2);
  });
}

TEST(RunRanksTest, init_inside_is_rejected) {
  run_ranks(1, [] { EXPECT_THROW(init_dist(), UsageError); });
}

// As DataParallel throws an error of one of its replicas.
TEST(RunRanksTest, a_nested_error_is_the_rank_s_own) {
  try {
    run_ranks(2, [](int rank) {
      if (rank == 0) barrier();
      try {
        throw std::runtime_error("no such file");
      } catch (...) {
        std::throw_with_nested(PeerFailed({.operation = "DataParallel"}, "replica 1 of 2 failed"));
      }
    });
    ADD_FAILURE() << "no error";
  } catch (const PeerFailed& error) {
    EXPECT_EQ(error.text(), "replica 1 of 2 failed");
  }
}

TEST(RunRanksTest, a_group_kept_longer_than_its_world) {
  Group kept;
  run_ranks(2, [&](int rank) {
    if (rank == 0) kept = default_group();
  });
  EXPECT_THROW(kept.barrier(), PeerLost);
}

}  // namespace
}  // namespace lockstep
