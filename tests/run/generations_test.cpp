#include "run/generations.hpp"

#include <gtest/gtest.h>

namespace lockstep::run {
namespace {

/// A rank asks, and gets a world.
int ask(Generations& generations, int rank, bool has_rank_left = false) {
  const int next = generations.next_of(rank, has_rank_left);
  generations.enter(rank, next);
  return next;
}

TEST(GenerationsTest, ranks_that_leave_together_meet_in_one_world) {
  Generations generations(3);
  for (int round = 1; round <= 3; ++round) {
    // The first that asks has left the newest world; that is none of the others' next one.
    EXPECT_EQ(ask(generations, round % 3, /*has_rank_left=*/true), round);
    EXPECT_EQ(ask(generations, (round + 1) % 3), round);
    EXPECT_EQ(ask(generations, (round + 2) % 3), round);
    EXPECT_EQ(generations.oldest(), round);
    EXPECT_EQ(generations.newest(), round);
  }
}

TEST(GenerationsTest, a_rank_that_gave_up_meets_those_that_come_later) {
  Generations generations(2);
  EXPECT_EQ(ask(generations, 0, true), 1);
  EXPECT_EQ(ask(generations, 0, true), 2);  // rank 1 did not come within the limit
  EXPECT_EQ(ask(generations, 1), 2);
}

TEST(GenerationsTest, nobody_is_sent_to_a_world_that_a_rank_gave_up) {
  Generations generations(3);
  EXPECT_EQ(ask(generations, 0, true), 1);
  EXPECT_EQ(ask(generations, 1, /*has_rank_left=*/true), 2);
  EXPECT_EQ(ask(generations, 0), 2);
  EXPECT_EQ(ask(generations, 2), 2);
}

TEST(GenerationsTest, a_world_is_kept_while_a_rank_is_there) {
  Generations generations(2);
  EXPECT_EQ(generations.oldest(), 0);
  ask(generations, 0, true);
  EXPECT_EQ(generations.oldest(), 0);
  EXPECT_EQ(generations.of(1), 0);
  ask(generations, 1);
  EXPECT_EQ(generations.oldest(), 1);
}

}  // namespace
}  // namespace lockstep::run
