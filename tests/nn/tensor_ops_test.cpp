#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include "helpers.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::on_ranks;

TEST(TensorOpsTest, all_reduce_every_type) {
  on_ranks(3, [](int rank) {
    for (const auto type : {at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                            at::kFloat, at::kDouble}) {
      Tensor data = at::full({2, 3}, rank + 1, type);
      all_reduce(data);
      EXPECT_TRUE(data.eq(6).all().item<bool>()) << data;
      all_reduce(data, ReduceOp::mean);
      EXPECT_TRUE(data.eq(6).all().item<bool>()) << data;
    }
  });
}

TEST(TensorOpsTest, strided_tensors_are_filled_in_place) {
  on_ranks(2, [](int rank) {
    const Tensor whole = at::zeros({3, 4});
    Tensor column = whole.select(1, 2);
    column.fill_(rank + 1);
    all_reduce(column);
    EXPECT_TRUE(whole.select(1, 2).eq(3).all().item<bool>());
    EXPECT_EQ(whole.sum().item<float>(), 9);
    column.fill_(rank);
    broadcast(column, /*src=*/1);
    EXPECT_EQ(whole.sum().item<float>(), 3);
  });
}

TEST(TensorOpsTest, all_gather_by_rank_and_broadcast_of_any_type) {
  on_ranks(3, [](int rank) {
    const auto all = all_gather(at::full({2, 1}, rank, at::kLong));
    ASSERT_EQ(all.size(), 3U);
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(all[static_cast<std::size_t>(r)].sizes(), (std::vector<std::int64_t>{2, 1}));
      EXPECT_TRUE(all[static_cast<std::size_t>(r)].eq(r).all().item<bool>());
    }
    Tensor flags = at::full({3}, rank == 2, at::kBool);
    broadcast(flags, /*src=*/2);
    EXPECT_TRUE(flags.all().item<bool>());
    EXPECT_EQ(all_gather(flags)[0].scalar_type(), at::kBool);
    Tensor scalar = at::ones({});
    all_reduce(scalar);
    EXPECT_EQ(scalar.item<float>(), 3);
    Tensor empty = at::ones({0, 2});
    all_reduce(empty);
  });
}

TEST(TensorOpsTest, what_cannot_travel_is_told) {
  Tensor flags = at::ones({2}, at::kBool), undefined, sparse = at::eye(2).to_sparse();
  EXPECT_THROW(all_reduce(flags), UsageError);
  EXPECT_THROW(all_reduce(undefined), UsageError);
  EXPECT_THROW(all_reduce(sparse), UsageError);
  EXPECT_THROW(broadcast(undefined), UsageError);
  EXPECT_THROW(elements_of(at::ones({2, 2}).t().select(0, 0)), UsageError);
}

TEST(TensorOpsTest, parameters_may_be_reduced_in_place) {
  on_ranks(2, [](int) {
    Tensor parameter = at::ones({2}).requires_grad_();
    all_reduce(parameter);
    EXPECT_TRUE(parameter.eq(2).all().item<bool>());
    EXPECT_TRUE(parameter.is_leaf());
  });
}

}  // namespace
}  // namespace lockstep::nn
