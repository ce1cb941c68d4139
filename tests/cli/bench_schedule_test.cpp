#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cli/bench/schedule.hpp"

namespace lockstep::test {
namespace {

using bench::Occurrences;
using bench::Placement;
using bench::Schedule;

/// Takes blocks as measure_all does; the machine's placement in turn t is placement_at(t).
/// Contestant i takes times[i]. Returns blocks by contestant and placement.
template <class PlacementAt>
std::map<std::pair<std::size_t, Placement>, int> take_blocks(Schedule& schedule,
                                                             const std::vector<double>& times,
                                                             PlacementAt placement_at) {
  std::map<std::pair<std::size_t, Placement>, int> n_blocks;
  Occurrences found;
  for (int turn = 0; turn < 1000; ++turn) {
    const Placement placement = placement_at(turn);
    found.add(placement);
    if (schedule.is_done(found)) return n_blocks;
    const auto contestant = schedule.next(placement);
    if (!contestant) continue;
    schedule.add(*contestant, placement, times[*contestant]);
    ++n_blocks[{*contestant, placement}];
  }
  ADD_FAILURE() << "not done after 1000 turns";
  return n_blocks;
}

TEST(BenchScheduleTest, contestants_alternate) {
  Schedule schedule({"lockstep", "openmpi", "mpich"}, /*n_blocks=*/2);
  for (std::size_t turn = 0; turn < 6; ++turn) {
    const auto contestant = schedule.next(Placement::near);
    ASSERT_TRUE(contestant.has_value());
    EXPECT_EQ(*contestant, turn % 3);
    schedule.add(*contestant, Placement::near, 1);
  }
  EXPECT_FALSE(schedule.next(Placement::near).has_value());
}

TEST(BenchScheduleTest, each_has_enough_blocks_in_every_placement_that_occurs) {
  Schedule schedule({"lockstep", "openmpi", "mpich"}, /*n_blocks=*/5);
  const auto n_blocks = take_blocks(schedule, {1, 2, 3}, [](int turn) {
    return turn / 7 % 2 == 0 ? Placement::near : Placement::far;
  });
  ASSERT_EQ(n_blocks.size(), 6U);
  for (const auto& [where, n] : n_blocks) EXPECT_EQ(n, 5);
}

TEST(BenchScheduleTest, a_rare_placement_is_not_waited_for) {
  Schedule schedule({"lockstep", "openmpi"}, /*n_blocks=*/5);
  const auto n_blocks = take_blocks(
      schedule, {1, 2}, [](int turn) { return turn == 3 ? Placement::far : Placement::near; });
  EXPECT_EQ(n_blocks.at({0, Placement::near}), 5);
  EXPECT_EQ(n_blocks.at({1, Placement::near}), 5);
}

TEST(BenchScheduleTest, a_clearly_slower_setting_has_a_trial_only) {
  Schedule schedule({"lockstep", "lockstep", "mpich", "mpich", "mpich"}, /*n_blocks=*/5);
  const auto n_blocks =
      take_blocks(schedule, {1, 10, 4, 2, 2.5}, [](int /*turn*/) { return Placement::near; });
  EXPECT_EQ(n_blocks.at({0, Placement::near}), 5);
  EXPECT_EQ(n_blocks.at({1, Placement::near}), 5) << "ranks that are threads are no setting";
  EXPECT_EQ(n_blocks.at({2, Placement::near}), 2);
  EXPECT_EQ(n_blocks.at({3, Placement::near}), 5);
  EXPECT_EQ(n_blocks.at({4, Placement::near}), 5);
}

// Its turns count, or it would have every turn.
TEST(BenchScheduleTest, one_whose_blocks_never_count_leaves_the_others_their_turns) {
  Schedule schedule({"lockstep", "openmpi"}, /*n_blocks=*/3);
  int n_of_other = 0;
  for (int turn = 0; turn < 6; ++turn) {
    const auto contestant = schedule.next(Placement::near);
    ASSERT_TRUE(contestant.has_value());
    if (*contestant == 1) schedule.add(1, Placement::near, 1), ++n_of_other;
  }
  EXPECT_EQ(n_of_other, 3);
}

TEST(BenchScheduleTest, one_that_failed_is_not_waited_for) {
  Schedule schedule({"lockstep", "openmpi"}, /*n_blocks=*/1);
  schedule.fail(1);
  Occurrences found;
  found.add(Placement::near);
  EXPECT_EQ(schedule.next(Placement::near), std::size_t{0});
  EXPECT_FALSE(schedule.is_done(found));
  schedule.add(0, Placement::near, 1);
  EXPECT_TRUE(schedule.is_done(found));
}

}  // namespace
}  // namespace lockstep::test
