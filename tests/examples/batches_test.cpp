#include "train/batches.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <vector>

namespace train {
namespace {

using Shares = std::vector<std::size_t>;

TEST(BatchesTest, cut_unequal) {
  EXPECT_EQ(cut(8, 1), (Shares{8}));
  EXPECT_EQ(cut(8, 3), (Shares{3, 3, 2}));
  EXPECT_EQ(cut(8, 4), (Shares{2, 2, 2, 2}));
  EXPECT_EQ(cut(2, 3), (Shares{1, 1, 0}));
}

TEST(BatchesTest, shares_as_wanted_or_equal) {
  EXPECT_EQ(shares_of(8, 3, {}), (Shares{3, 3, 2}));
  EXPECT_EQ(shares_of(8, 3, {5, 2, 1}), (Shares{5, 2, 1}));
}

TEST(BatchesTest, shares_that_do_not_fit) {
  EXPECT_THROW(shares_of(8, 3, {5, 3}), std::invalid_argument);
  EXPECT_THROW(shares_of(8, 3, {5, 2, 2}), std::invalid_argument);
  EXPECT_THROW(shares_of(8, 3, {6, 2, 0}), std::invalid_argument);
  EXPECT_THROW(shares_of(2, 3, {}), std::invalid_argument);
}

TEST(BatchesTest, parts_make_the_batch) {
  const std::vector<int> batch = {1, 2, 3, 4, 5, 6, 7, 8};
  const Shares shares = {5, 2, 1};
  std::vector<int> together;
  for (int rank = 0; rank < 3; ++rank) {
    const auto part = part_of(std::span<const int>(batch), shares, rank);
    EXPECT_EQ(part.size(), shares[static_cast<std::size_t>(rank)]);
    together.insert(together.end(), part.begin(), part.end());
  }
  EXPECT_EQ(together, batch);
}

TEST(BatchesTest, order_is_a_permutation_of_its_own) {
  const auto order = epoch_order(100, /*seed=*/1, /*epoch=*/0);
  EXPECT_EQ(std::set<std::int64_t>(order.begin(), order.end()).size(), 100U);
  EXPECT_EQ(*std::max_element(order.begin(), order.end()), 99);
  EXPECT_EQ(order, epoch_order(100, 1, 0));
  EXPECT_NE(order, epoch_order(100, 1, 1));
  EXPECT_NE(order, epoch_order(100, 2, 0));
  EXPECT_NE(order, epoch_order(100, (std::uint64_t{1} << 32) + 1, 0));
}

}  // namespace
}  // namespace train
