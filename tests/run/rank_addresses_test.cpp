#include "run/rank_addresses.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace lockstep::run {
namespace {

RankAddress of(int rank, std::uint64_t world) {
  return {.rank = rank, .world = world, .bytes = "at " + std::to_string(rank)};
}

TEST(RankAddressesTest, are_known_when_each_rank_has_given_one) {
  RankAddresses addresses(3);
  EXPECT_EQ(addresses.missing(0), (std::vector{0, 1, 2}));
  addresses.add(of(2, 0));
  addresses.add(of(0, 0));
  addresses.add(of(0, 0));
  EXPECT_FALSE(addresses.are_known(0));
  EXPECT_EQ(addresses.missing(0), std::vector{1});
  addresses.add(of(1, 1));  // in the next world
  EXPECT_FALSE(addresses.are_known(0));
  addresses.add(of(1, 0));
  ASSERT_TRUE(addresses.are_known(0));
  EXPECT_EQ(addresses.of(0), (std::vector<std::string>{"at 0", "at 1", "at 2"}));
  EXPECT_FALSE(addresses.are_known(1));
}

TEST(RankAddressesTest, one_that_is_taken_back_is_missing) {
  RankAddresses addresses(2);
  addresses.add(of(0, 0));
  addresses.add({.rank = 0, .world = 0, .bytes = {}});
  addresses.add({.rank = 0, .world = 0, .bytes = {}});
  addresses.add(of(1, 0));
  EXPECT_FALSE(addresses.are_known(0));
  EXPECT_EQ(addresses.missing(0), std::vector{0});
  addresses.add(of(0, 0));
  EXPECT_TRUE(addresses.are_known(0));
}

TEST(RankAddressesTest, those_of_no_rank_and_of_too_many_worlds_are_ignored) {
  RankAddresses addresses(1);
  addresses.add(of(-1, 0));
  addresses.add(of(1, 0));
  EXPECT_FALSE(addresses.are_known(0));
  for (std::uint64_t world = 0; world < 100; ++world) addresses.add(of(0, world));
  EXPECT_TRUE(addresses.are_known(15));
  EXPECT_FALSE(addresses.are_known(16));
  addresses.forget_before(16);
  addresses.add(of(0, 16));
  EXPECT_TRUE(addresses.are_known(16));
}

}  // namespace
}  // namespace lockstep::run
