#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/nn.hpp>

#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "device_ranks.hpp"
#include "helpers.hpp"

/// The layer on CUDA tensors: a rank alone, replicas on one device, processes on one device,
/// threads with a device each.
namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::difference;
using testing::on_ranks;
using testing::outcome_of;
using testing::Random;
using testing::share_of;
using testing::Shares;

class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) {
      GTEST_SKIP() << "no CUDA device, or a libtorch without CUDA: nothing of lockstep::nn's CUDA "
                      "path was run";
    }
  }
};

const at::Device kDevice(at::kCUDA, 0);

at::Device device_of(int rank) { return {at::kCUDA, static_cast<at::DeviceIndex>(rank)}; }

/// libtorch has one backward thread for each device: two ranks' nodes would wait there for each
/// other, one behind the other.
class CudaThreadsTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped() && torch::cuda::device_count() < 2) {
      GTEST_SKIP() << "ranks that are threads need a CUDA device each, and here is one";
    }
  }
};

TEST_F(CudaTest, a_world_of_one_equals_batch_norm) {
  for (const auto type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const bool last : {false, true}) {
      EXPECT_EQ(device_ranks::layer_differs({type, last, {6}}, kDevice), "") << type << last;
    }
  }
}

TEST_F(CudaThreadsTest, equal_one_with_the_whole_batch) {
  for (const Shares& shares : {Shares{4, 2}, Shares{0, 6}}) {
    on_ranks(static_cast<int>(shares.size()), [&](int rank) {
      EXPECT_EQ(device_ranks::layer_differs({at::kDouble, false, shares}, device_of(rank)), "");
    });
  }
}

TEST_F(CudaTest, replicas_on_one_device) {
  const Tensor x = (Random(1).normal({6, 5, 4, 3}) + 0.5).to(kDevice);
  const Tensor dy = Random(2).normal({6, 5, 4, 3}).to(kDevice);
  torch::nn::BatchNorm2d whole(5);
  SyncBatchNorm2d bn(5);
  whole->to(kDevice, at::kDouble);
  bn->to(kDevice, at::kDouble);
  DataParallel replicas(bn, {kDevice, kDevice});
  for (int step = 0; step < 2; ++step) {
    const Tensor a = x.detach().requires_grad_(), b = x.detach().requires_grad_();
    const Tensor expected = whole->forward(a), got = replicas(b);
    expected.backward(dy);
    got.backward(dy);
    EXPECT_LE(difference(got, expected), 1e-12);
    EXPECT_LE(difference(b.grad(), a.grad()), 1e-12);
  }
  EXPECT_LE(difference(bn->weight.grad(), whole->weight.grad()), 1e-12);
  EXPECT_LE(difference(bn->running_var, whole->running_var), 1e-12);
}

TEST_F(CudaThreadsTest, a_scope_and_ddp_over_typed_members) {
  const Tensor x = Random(1).normal({6, 5, 4, 3}).to(kDevice);
  torch::nn::Sequential whole(torch::nn::Conv2d(5, 3, 3), torch::nn::BatchNorm2d(3));
  whole->to(kDevice, at::kDouble);
  std::stringstream saved;
  torch::save(whole, saved);
  whole->forward(x).square().mean().backward();
  on_ranks(2, [&](int rank) {
    torch::nn::Sequential net(torch::nn::Conv2d(5, 3, 3), torch::nn::BatchNorm2d(3));
    std::stringstream archive(saved.str());
    torch::load(net, archive);
    const at::Device device = device_of(rank);
    net->to(device, at::kDouble);
    DistributedDataParallel model(net);
    const SyncBatchNormScope scope;
    model(share_of(x, Shares{3, 3}, rank).to(device)).square().mean().backward();
    for (const auto& item : net->named_parameters()) {
      const Tensor expected = whole->named_parameters()[item.key()].grad();
      EXPECT_LE(difference(item->grad().to(kDevice), expected), 1e-12) << item.key();
      EXPECT_EQ(item->grad().device(), device);
    }
  });
}

/// Processes on one device: device_ranks.hpp.
void expect_equal_to_one(int n, const std::string& backend, const std::string& device) {
  const std::string here = std::filesystem::read_symlink("/proc/self/exe");
  const auto ended = test::run({"-n", std::to_string(n), here, "device_ranks", backend, device});
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_TRUE(test::contains(ended.out, " right over " + backend)) << ended.out << ended.err;
}

TEST(CpuRanksTest, processes_equal_one_with_the_whole_batch) {
  expect_equal_to_one(2, "shared", "cpu");
  expect_equal_to_one(3, "gloo", "cpu");
}

class CudaRanksTest : public CudaTest {};

TEST_F(CudaRanksTest, two_on_one_device_equal_one_with_the_whole_batch) {
  expect_equal_to_one(2, "shared", "cuda");
  expect_equal_to_one(2, "gloo", "cuda");
}

TEST_F(CudaRanksTest, one_over_nccl_equals_batch_norm) { expect_equal_to_one(1, "nccl", "cuda"); }

}  // namespace
}  // namespace lockstep::nn
