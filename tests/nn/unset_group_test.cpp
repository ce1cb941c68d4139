#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/nn.hpp>

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "helpers.hpp"
#include "support/expect.hpp"
#include "support/ranks.hpp"

/// What was made before this thread had a world takes part in the one that it has when it is used.
namespace lockstep::nn::unset_group_test {
namespace {

using at::Tensor;
using testing::difference;
using testing::on_ranks;
using testing::Random;
using testing::share_of;

constexpr int kRanks = 2;
const testing::Shares kShares{4, 2};

Tensor whole_batch() { return Random(1).normal({6, 3}); }

/// Running statistics of a BatchNorm that saw the whole batch.
torch::nn::BatchNorm1d expected() {
  torch::nn::BatchNorm1d whole(3);
  whole->to(at::kDouble);
  whole->forward(whole_batch());
  return whole;
}

void expect_statistics_of_all_ranks(const torch::nn::Module& module, const std::string& prefix) {
  const auto whole = expected();
  const auto buffers = module.named_buffers();
  EXPECT_LE(difference(buffers[prefix + "running_mean"], whole->running_mean), 1e-12);
  EXPECT_LE(difference(buffers[prefix + "running_var"], whole->running_var), 1e-12);
}

TEST(UnsetGroupTest, a_layer_made_before_the_world) {
  std::vector<SyncBatchNorm1d> layers;
  for (int i = 0; i < kRanks; ++i) {
    layers.emplace_back(SyncBatchNormOptions(3));
    layers.back()->to(at::kDouble);
  }
  on_ranks(kRanks, [&](int rank) {
    auto& layer = layers[static_cast<std::size_t>(rank)];
    layer->forward(share_of(whole_batch(), kShares, rank));
    expect_statistics_of_all_ranks(*layer, "");
  });
}

TEST(UnsetGroupTest, a_module_converted_before_the_world) {
  std::vector<torch::nn::Sequential> nets;
  for (int i = 0; i < kRanks; ++i) {
    nets.emplace_back(torch::nn::BatchNorm1d(3));
    nets.back()->to(at::kDouble);
    convert_sync_batchnorm(nets.back());
  }
  on_ranks(kRanks, [&](int rank) {
    auto& net = nets[static_cast<std::size_t>(rank)];
    net->forward(share_of(whole_batch(), kShares, rank));
    expect_statistics_of_all_ranks(*net, "0.");
  });
}

/// A dry run before init_dist must not bind the layer to this rank alone.
TEST(UnsetGroupTest, a_layer_used_before_the_world) {
  std::vector<SyncBatchNorm1d> layers;
  for (int i = 0; i < kRanks; ++i) {
    layers.emplace_back(3);
    layers.back()->to(at::kDouble);
    layers.back()->forward(Random(7).normal({5, 3}));
    layers.back()->reset_running_stats();
  }
  on_ranks(kRanks, [&](int rank) {
    auto& layer = layers[static_cast<std::size_t>(rank)];
    layer->forward(share_of(whole_batch(), kShares, rank));
    expect_statistics_of_all_ranks(*layer, "");
  });
}

TEST(UnsetGroupTest, replicas_made_and_used_before_the_world) {
  const std::vector<at::Device> two_workers{at::kCPU, at::kCPU};
  std::vector<DataParallel<torch::nn::Sequential>> models;
  for (int i = 0; i < kRanks; ++i) {
    torch::nn::Sequential net(torch::nn::BatchNorm1d(3));
    net->to(at::kDouble);
    convert_sync_batchnorm(net);
    models.emplace_back(net, two_workers);
    models.back()(Random(7).normal({5, 3}));  // the copies are kept
    net->ptr(0)->as<SyncBatchNorm1d>()->reset_running_stats();
  }
  on_ranks(kRanks, [&](int rank) {
    auto& model = models[static_cast<std::size_t>(rank)];
    model(share_of(whole_batch(), kShares, rank));
    expect_statistics_of_all_ranks(*model.module(), "0.");
  });
}

TEST(UnsetGroupTest, a_scope_made_before_the_world) {
  const auto whole = expected();  // in the scope it would be synchronised too
  const SyncBatchNormScope scope;
  test::run_as({test::Form::processes, kRanks}, [&whole] {
    torch::nn::BatchNorm1d layer(3);
    layer->to(at::kDouble);
    layer->forward(share_of(whole_batch(), kShares, get_rank()));
    EXPECT_LE(difference(layer->running_mean, whole->running_mean), 1e-12);
    EXPECT_LE(difference(layer->running_var, whole->running_var), 1e-12);
  });
}

TEST(UnsetGroupTest, ddp_options_made_before_the_world) {
  const DistributedDataParallelOptions options;
  on_ranks(kRanks, [&](int rank) {
    torch::nn::Linear layer(1, 1);
    DistributedDataParallel model(layer, options);
    model(at::full({1, 1}, rank + 1.0)).sum().backward();
    EXPECT_EQ(layer->weight.grad().item<double>(), 1.5);  // the mean of 1 and 2
  });
}

TEST(UnsetGroupTest, a_group_that_was_given_stays) {
  std::vector<SyncBatchNorm1d> layers;
  for (int i = 0; i < kRanks; ++i) layers.emplace_back(SyncBatchNormOptions(3).group(Group()));
  on_ranks(kRanks, [&](int rank) {
    auto& layer = layers[static_cast<std::size_t>(rank)];
    const Tensor mine = share_of(whole_batch(), kShares, rank).to(at::kFloat);
    layer->forward(mine);
    EXPECT_LE(difference(layer->running_mean, mine.mean(0) * 0.1), 1e-6);
  });
}

TEST(UnsetGroupTest, a_layer_stays_in_the_world_it_was_first_used_in) {
  SyncBatchNorm1d kept = nullptr;
  on_ranks(kRanks, [&](int rank) {
    SyncBatchNorm1d layer(3);
    layer->forward(at::ones({2, 3}));
    if (rank == 0) kept = layer;
  });
  // Its ranks are gone: alone it would continue without them, unnoticed.
  EXPECT_THROW(kept->forward(at::ones({2, 3})), Error);
}

TEST(UnsetGroupTest, prints_what_it_is) {
  std::stringstream unset, given;
  unset << *SyncBatchNorm1d(3);
  given << *SyncBatchNorm1d(SyncBatchNormOptions(3).group(Group()));
  test::expect_contains(unset.str(), "group=default)");
  test::expect_contains(given.str(), "group=" + Group().name() + ")");
}

}  // namespace
}  // namespace lockstep::nn::unset_group_test
