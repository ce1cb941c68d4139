#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/dist.hpp>
#include <lockstep/nn.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "helpers.hpp"

/// ResNet-18 over 4 ranks against one rank with the whole batch, in float64. As it is, 8 channels
/// and 16 x 16 images; with LOCKSTEP_LONG_TESTS set, ResNet-18's 64 channels and CIFAR's 32 x 32.
namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::on_ranks;
using testing::Random;
using testing::share_of;
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

  std::vector<std::int64_t> shares_at(int i) const {
    auto result = shares;
    for (std::size_t r = 0; r < result.size(); ++r) {
      if (i >= n_batches[r]) result[r] = 0;
    }
    return result;
  }
};

/// Trains `step(i, is_last_of_accumulated)` calls; forward takes images to logits.
template <class Forward, class Backward>
void step(const Plan& plan, int rank, int i, Forward forward, Backward backward) {
  auto shares = plan.shares_at(i);
  const auto n = std::accumulate(shares.begin(), shares.end(), std::int64_t{0});
  const double n_ranks = rank < 0 ? 1 : static_cast<double>(shares.size());
  if (rank < 0) shares = {n};  // the whole batch
  Random random(static_cast<std::uint64_t>(500 + i));
  const std::int64_t side = is_long() ? 32 : 16;
  const Tensor images = random.normal({n, 3, side, side});
  const Tensor labels = random.classes(10, n);
  const int part = std::max(rank, 0);
  const Tensor loss = functional::cross_entropy(
      forward(share_of(images, shares, part)), share_of(labels, shares, part),
      functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  backward(loss * (n_ranks / static_cast<double>(n)));
}

std::vector<Tensor> state_of(const Module& net) {
  std::vector<Tensor> state;
  for (const auto& parameter : net.parameters()) state.push_back(parameter.detach());
  for (const auto& buffer : net.buffers()) state.push_back(buffer);
  return state;
}

torch::optim::SGD optimizer_of(const Module& net) {
  return torch::optim::SGD(net.parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
}

std::vector<Tensor> train_on_one_rank(const Plan& plan) {
  auto net = resnet18(is_long() ? 64 : 8, /*seed=*/1);
  auto optimizer = optimizer_of(*net);
  const int n = *std::max_element(plan.n_batches.begin(), plan.n_batches.end());
  for (int i = 0; i < n; ++i) {
    step(
        plan, /*rank=*/-1, i, [&](const Tensor& x) { return net->forward(x); },
        [](const Tensor& loss) { loss.backward(); });
    if ((i + 1) % plan.n_accumulated != 0) continue;
    optimizer.step();
    optimizer.zero_grad();
  }
  return state_of(*net);
}

std::vector<Tensor> train_on_this_rank(const Plan& plan, int rank) {
  auto net = resnet18(is_long() ? 64 : 8, /*seed=*/static_cast<std::uint64_t>(1 + rank));
  convert_sync_batchnorm(net);
  // Sequential's forward is a template: DistributedDataParallel calls it with a tensor.
  DistributedDataParallelOptions options;
  options.bucket_cap_mb = 0.2;
  options.first_bucket_cap_mb = 0.02;
  DistributedDataParallel model(net, options);
  auto optimizer = optimizer_of(*net);
  const auto train = [&] {
    for (int i = 0; i < plan.n_batches[static_cast<std::size_t>(rank)]; ++i) {
      const auto forward_and_backward = [&] {
        step(
            plan, rank, i, [&](const Tensor& x) { return model(x); },
            [](const Tensor& loss) { loss.backward(); });
      };
      if ((i + 1) % plan.n_accumulated != 0) {
        const auto guard = model.no_sync();
        forward_and_backward();
        continue;
      }
      forward_and_backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  model.join(train, {.optimizers = {&optimizer}});
  return state_of(*net);
}

void expect_like_one_rank(const Plan& plan) {
  const auto expected = train_on_one_rank(plan);
  double worst = 0;
  on_ranks(4, [&](int rank) {
    const auto got = train_on_this_rank(plan, rank);
    ASSERT_EQ(got.size(), expected.size());
    double mine = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      mine = std::max(mine, testing::difference(got[i], expected[i]));
    }
    EXPECT_LE(mine, 1e-8);
    const double all = all_reduce_value(mine, ReduceOp::max);
    if (rank == 0) worst = all;
  });
  ::testing::Test::RecordProperty("largest_difference", c10::str(worst));
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
