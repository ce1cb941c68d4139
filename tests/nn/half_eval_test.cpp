#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/nn.hpp>

#include <string>

#include "helpers.hpp"

/// Eval mode of a SyncBatchNorm with 16-bit input, for which libtorch's CPU kernels are not
/// complete.
namespace lockstep::nn::half_eval_test {
namespace {

using at::Tensor;
using testing::difference;
using testing::Random;

struct HalfCase {
  at::ScalarType input, state;
  bool affine, track;
};

class HalfEvalTest : public ::testing::TestWithParam<HalfCase> {};

TEST_P(HalfEvalTest, is_batch_norm_in_float32_rounded_once) {
  const auto [type, state, affine, track] = GetParam();
  Random random(5);
  SyncBatchNorm2d ours(SyncBatchNormOptions(3).affine(affine).track_running_stats(track));
  torch::nn::BatchNorm2d reference(
      torch::nn::BatchNormOptions(3).affine(affine).track_running_stats(track));
  {
    const at::NoGradGuard no_grad;
    for (const bool is_buffer : {false, true}) {
      const auto to = is_buffer ? ours->named_buffers() : ours->named_parameters();
      const auto too = is_buffer ? reference->named_buffers() : reference->named_parameters();
      for (const auto& item : to) {
        if (item.key() == "num_batches_tracked") continue;
        // Values that the 16-bit type has: both modules get the same.
        item->copy_(random.normal({3}).abs().add(0.5).to(type));
        too[item.key()].copy_(*item);
      }
    }
  }
  ours->to(state);
  ours->eval();
  reference->eval();
  for (const bool channels_last : {false, true}) {
    const Tensor values = random.normal({4, 3, 5, 5}, type),
                 gradient = random.normal({4, 3, 5, 5}, type);
    const Tensor x = channels_last ? testing::channels_last(values) : values.clone();
    x.requires_grad_();
    const Tensor y = ours->forward(x);
    EXPECT_EQ(y.scalar_type(), type);
    EXPECT_EQ(testing::is_channels_last(y), channels_last);
    const Tensor x2 = values.to(at::kFloat).requires_grad_();
    const Tensor y2 = reference->forward(x2);
    EXPECT_LE(difference(y, y2.to(type)), 1e-6);
    ours->zero_grad();
    reference->zero_grad();
    y.backward(gradient);
    y2.backward(gradient.to(at::kFloat));
    EXPECT_EQ(x.grad().scalar_type(), type);
    EXPECT_LE(difference(x.grad(), x2.grad().to(type)), 1e-6);
    if (!affine) continue;
    EXPECT_EQ(ours->weight.grad().scalar_type(), state);
    EXPECT_LE(difference(ours->weight.grad(), reference->weight.grad().to(state)), 1e-4);
    EXPECT_LE(difference(ours->bias.grad(), reference->bias.grad().to(state)), 1e-4);
  }
}

INSTANTIATE_TEST_SUITE_P(all, HalfEvalTest,
                         ::testing::Values(HalfCase{at::kHalf, at::kHalf, true, true},
                                           HalfCase{at::kHalf, at::kFloat, true, true},
                                           HalfCase{at::kHalf, at::kFloat, false, true},
                                           HalfCase{at::kHalf, at::kHalf, true, false},
                                           HalfCase{at::kBFloat16, at::kBFloat16, true, true},
                                           HalfCase{at::kBFloat16, at::kFloat, true, true}));

/// Training, then eval, as a program does; on two ranks.
TEST(HalfEvalOnRanksTest, train_then_eval) {
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    testing::on_ranks(2, [type](int rank) {
      torch::nn::Sequential net(torch::nn::BatchNorm2d(3));
      convert_sync_batchnorm(net);
      net->to(type);
      const Tensor x = Random(6).normal({6, 3, 4, 4}, type).narrow(0, 3 * rank, 3);
      net->forward(x);
      net->eval();
      const Tensor y = net->forward(x);
      EXPECT_EQ(y.scalar_type(), type);
      EXPECT_TRUE(y.isfinite().all().item<bool>());
    });
  }
}

}  // namespace
}  // namespace lockstep::nn::half_eval_test
