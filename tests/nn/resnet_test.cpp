#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/dist.hpp>
#include <lockstep/nn.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "helpers.hpp"
#include "training.hpp"

/// ResNet-18 over 4 ranks against one rank with the whole batch, in float64. As it is, 8 channels
/// and 16 x 16 images; with LOCKSTEP_LONG_TESTS set, ResNet-18's 64 channels and CIFAR's 32 x 32.
namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::Random;
using namespace torch::nn;  // NOLINT: the net below reads as it would in a program

bool is_long() { return std::getenv("LOCKSTEP_LONG_TESTS") != nullptr; }

Conv2d conv(std::int64_t in, std::int64_t out, std::int64_t size, std::int64_t stride) {
  return Conv2d(Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
}

struct ResidualBlockImpl : Module {
  Sequential body, shortcut;
  ResidualBlockImpl(std::int64_t in, std::int64_t out, std::int64_t stride)
      : body(conv(in, out, 3, stride), BatchNorm2d(out), ReLU(), conv(out, out, 3, 1),
             BatchNorm2d(out)) {
    register_module("body", body);
    if (stride != 1 || in != out) {
      shortcut->push_back(conv(in, out, 1, stride));
      shortcut->push_back(BatchNorm2d(out));
    }
    register_module("shortcut", shortcut);
  }
  Tensor forward(const Tensor& x) {
    return torch::relu(body->forward(x) + (shortcut->is_empty() ? x : shortcut->forward(x)));
  }
};
TORCH_MODULE(ResidualBlock);

Sequential resnet18(std::int64_t width, std::uint64_t seed) {
  Sequential net(conv(3, width, 3, 1), BatchNorm2d(width), ReLU());
  std::int64_t in = width;
  for (int stage = 0; stage < 4; ++stage) {
    const std::int64_t out = width << stage;
    net->push_back(ResidualBlock(in, out, stage == 0 ? 1 : 2));
    net->push_back(ResidualBlock(out, out, 1));
    in = out;
  }
  net->push_back(AdaptiveAvgPool2d(1));
  net->push_back(Flatten());
  net->push_back(Linear(in, 10));
  net->to(at::kDouble);
  const at::NoGradGuard no_grad;
  Random random(seed);
  for (auto& parameter : net->parameters()) {
    const double fan_in = parameter.dim() == 4 ? static_cast<double>(parameter[0].numel()) : 10;
    const Tensor values = random.normal(parameter.sizes());
    parameter.copy_(parameter.dim() == 1 ? 1 + 0.1 * values : values * std::sqrt(2 / fan_in));
  }
  return net;
}

/// The batches of 4 ranks: rank r has n_batches[r] of shares[r] samples each.
struct Plan {
  std::vector<std::int64_t> shares{2, 2, 2, 2};
  std::vector<int> n_batches{30, 30, 30, 30};
  int n_accumulated = 1;

  testing::Shares shares_at(int i) const {
    auto result = shares;
    for (std::size_t r = 0; r < result.size(); ++r) {
      if (i >= n_batches[r]) result[r] = 0;
    }
    return result;
  }
};

void expect_like_one_rank(const Plan& plan) {
  testing::Training training;
  training.make_net = [](std::uint64_t seed) { return resnet18(is_long() ? 64 : 8, seed); };
  training.make_optimizer = testing::make_sgd(0.02);
  training.make_batch = [](Random& random, std::int64_t n) {
    const std::int64_t side = is_long() ? 32 : 16;
    const Tensor images = random.normal({n, 3, side, side});
    return testing::Batch{images, random.classes(10, n)};
  };
  training.loss = testing::summed_cross_entropy;
  training.shares = [&plan](int /*epoch*/, int i) { return plan.shares_at(i); };
  training.n_batches = *std::max_element(plan.n_batches.begin(), plan.n_batches.end());
  training.n_accumulated = plan.n_accumulated;
  training.joins = true;
  training.ddp = {.bucket_cap_mb = 0.2, .first_bucket_cap_mb = 0.02};
  testing::expect_like_one_rank(training, {test::Form::threads, 4}, 1e-8);
}

TEST(ResNet18Test, four_ranks_of_two_equal_one_of_eight) { expect_like_one_rank({}); }

TEST(ResNet18Test, with_accumulation) { expect_like_one_rank({.n_accumulated = 2}); }

TEST(ResNet18Test, with_join_and_uneven_data) {
  expect_like_one_rank({.shares = {3, 2, 2, 1}, .n_batches = {30, 30, 24, 11}});
}

TEST(ResNet18Test, with_join_uneven_data_and_accumulation) {
  expect_like_one_rank({.shares = {3, 2, 2, 1}, .n_batches = {20, 30, 25, 11}, .n_accumulated = 2});
}

}  // namespace
}  // namespace lockstep::nn
