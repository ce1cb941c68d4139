#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "helpers.hpp"
#include "support/ranks.hpp"
#include "training.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::difference;
using testing::on_ranks;
using testing::Random;

using Shares = std::vector<std::int64_t>;

class TrainingTest : public ::testing::TestWithParam<std::tuple<test::Form, Shares>> {
 protected:
  static void on_shares(const Shares& shares, const std::function<void()>& body) {
    test::run_as({std::get<0>(GetParam()), static_cast<int>(shares.size())}, body);
  }
};

TEST_P(TrainingTest, ranks_with_sync_batch_norm_equal_one_rank) {
  const Shares& shares = std::get<1>(GetParam());
  on_shares(shares, [&] {
    const double worst = testing::difference_from_one_rank(default_group(), shares, true);
    if (is_main_process()) RecordProperty("largest_difference", c10::str(worst));
    EXPECT_LE(worst, 1e-9);
  });
}

INSTANTIATE_TEST_SUITE_P(
    shares, TrainingTest,
    ::testing::Combine(::testing::Values(test::Form::threads, test::Form::processes),
                       ::testing::Values(Shares{8}, Shares{5, 3}, Shares{8, 0}, Shares{5, 2, 1},
                                         Shares{4, 2, 2}, Shares{3, 2, 2, 1}, Shares{2, 2, 2, 2})));

/// Shares of 2 or more: plain BatchNorm1d refuses one sample.
class PlainTrainingTest : public TrainingTest {};

TEST_P(PlainTrainingTest, ranks_with_plain_batch_norm_do_not) {
  const Shares& shares = std::get<1>(GetParam());
  on_shares(shares, [&] {
    EXPECT_GE(testing::difference_from_one_rank(default_group(), shares, false), 1e-3);
  });
}

INSTANTIATE_TEST_SUITE_P(
    shares, PlainTrainingTest,
    ::testing::Combine(::testing::Values(test::Form::threads, test::Form::processes),
                       ::testing::Values(Shares{5, 3}, Shares{4, 2, 2}, Shares{2, 2, 2, 2})));

struct LinearsImpl : torch::nn::Module {
  torch::nn::Linear used{2, 3}, sometimes{2, 3}, never{2, 3};
  LinearsImpl() {
    register_module("used", used);
    register_module("sometimes", sometimes);
    register_module("never", never);
  }
  Tensor forward(const Tensor& x, bool both) { return both ? used(x) + sometimes(x) : used(x); }
};
TORCH_MODULE(Linears);

/// So small that each parameter has its own bucket.
DistributedDataParallelOptions tiny_buckets() {
  return {.bucket_size_mb = 1e-6, .first_bucket_size_mb = 1e-6};
}

TEST(DistributedDataParallelTest, everybody_starts_from_rank_0) {
  on_ranks(3, [](int rank) {
    torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(rank + 1);
      for (auto& buffer : net->buffers()) buffer.fill_(rank + 5);
    }
    const auto parameters = net->parameters();
    const DistributedDataParallel model(net);
    for (const auto& parameter : net->parameters()) EXPECT_TRUE(parameter.eq(1).all().item<bool>());
    for (const auto& buffer : net->buffers()) EXPECT_TRUE(buffer.eq(5).all().item<bool>());
    EXPECT_TRUE(net->parameters()[0].is_same(parameters[0]));
  });
}

TEST(DistributedDataParallelTest, averages_gradients_of_every_type_and_layout) {
  on_ranks(3, [](int rank) {
    struct NetImpl : torch::nn::Module {
      Tensor f64 = register_parameter("f64", at::ones({3}, at::kDouble));
      Tensor f32 = register_parameter(
          "f32", at::ones({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
      Tensor bf16 = register_parameter("bf16", at::ones({5}, at::kBFloat16));
      Tensor scalar = register_parameter("scalar", at::ones({}));
      Tensor empty = register_parameter("empty", at::ones({0}));
      Tensor forward(double factor) {
        return ((f64.sum() + f32.sum() + bf16.sum() + scalar + empty.sum()) * factor).sum();
      }
    };
    const auto net = std::make_shared<NetImpl>();
    for (const auto& options : {DistributedDataParallelOptions(), tiny_buckets()}) {
      DistributedDataParallel model(net, options);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        model(static_cast<double>(rank + step)).backward();
        for (const auto& parameter : net->parameters()) {
          EXPECT_TRUE(parameter.grad().eq(1 + step).all().item<bool>());
          EXPECT_EQ(parameter.grad().scalar_type(), parameter.scalar_type());
        }
        EXPECT_TRUE(net->f32.grad().is_contiguous(at::MemoryFormat::ChannelsLast));
      }
    }
  });
}

TEST(DistributedDataParallelTest, no_sync_accumulates_on_this_rank) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(net);
    const auto backward = [&](double x) { model(at::full({1, 1}, x)).sum().backward(); };
    {
      const auto guard = model.no_sync();
      backward(rank == 0 ? 1 : 3);
      backward(rank == 0 ? 2 : 4);
      EXPECT_EQ(net->weight.grad().item<float>(), rank == 0 ? 3 : 7);
    }
    backward(rank == 0 ? 10 : 20);
    EXPECT_EQ(net->weight.grad().item<float>(), (13 + 27) / 2);
    backward(rank == 0 ? 0 : 2);  // on top of the averaged ones
    EXPECT_EQ(net->weight.grad().item<float>(), 21);
  });
}

TEST(DistributedDataParallelTest, frozen_parameters_take_no_part) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear net(2, 2);
    net->weight.requires_grad_(false);
    DistributedDataParallel model(net);
    model(at::ones({rank + 1, 2})).sum().backward();
    EXPECT_FALSE(net->weight.grad().defined());
    EXPECT_TRUE(net->bias.grad().eq(1.5).all().item<bool>());
  });
}

TEST(DistributedDataParallelTest, unused_parameters_hang_nobody) {
  on_ranks(2, [](int rank) {
    Linears net;
    DistributedDataParallel model(net, tiny_buckets());
    const Tensor x = at::ones({1, 2});
    for (int step = 0; step < 2; ++step) {
      model(x, /*both=*/rank == 1).sum().backward();
      EXPECT_TRUE(net->used->bias.grad().eq(1 + step).all().item<bool>());
      ASSERT_TRUE(net->sometimes->bias.grad().defined()) << "a peer had one";
      EXPECT_FALSE(net->never->bias.grad().defined());
    }
    net->zero_grad();
    model(x, /*both=*/rank == 1).sum().backward();
    EXPECT_TRUE(net->sometimes->bias.grad().eq(0.5).all().item<bool>());
  });
}

TEST(DistributedDataParallelTest, a_parameter_used_twice) {
  on_ranks(2, [](int) {
    torch::nn::Linear net(2, 2);
    DistributedDataParallel model(net);
    const Tensor x = at::ones({1, 2});
    (model(x) + model(x)).sum().backward();
    EXPECT_TRUE(net->bias.grad().eq(2).all().item<bool>());
  });
}

TEST(DistributedDataParallelTest, different_modules_are_told_on_every_rank) {
  on_ranks(3, [](int rank) {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::Linear(3, rank == 2 ? 4 : 3));
    try {
      const DistributedDataParallel model(net);
      ADD_FAILURE() << "no error";
    } catch (const MismatchError& error) {
      EXPECT_NE(error.text().find("rank 0 has parameter 1.weight Float [3, 3], rank 2 has "
                                  "parameter 1.weight Float [4, 3]"),
                std::string::npos)
          << error.text();
    }
  });
}

TEST(DistributedDataParallelTest, a_peers_exception_reaches_backward) {
  std::mutex mutex;
  std::vector<std::string> texts;
  const auto body = [&](int rank) {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::Linear(3, 3));
    DistributedDataParallel model(net, tiny_buckets());
    Tensor y = model(at::ones({1, 2}));
    if (rank == 1) {
      y.register_hook([](const Tensor&) { throw std::runtime_error("no more paper"); });
    }
    try {
      y.sum().backward();
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      texts.emplace_back(error.what());
      EXPECT_THROW(model(at::ones({1, 2})), UsageError);  // out of step: says so
      throw;
    }
  };
  EXPECT_THROW(on_ranks(3, body), std::runtime_error);
  ASSERT_EQ(texts.size(), 2U);
  for (const auto& text : texts) EXPECT_NE(text.find("no more paper"), std::string::npos) << text;
}

TEST(DistributedDataParallelTest, an_exception_after_the_first_bucket) {
  EXPECT_THROW(on_ranks(2,
                        [&](int rank) {
                          torch::nn::Linear first(2, 3), second(3, 3);
                          torch::nn::Sequential net(first, second);
                          DistributedDataParallel model(net, tiny_buckets());
                          if (rank == 1) {
                            first->weight.register_hook(
                                [](const Tensor&) { throw std::runtime_error("too late"); });
                          }
                          model(at::ones({1, 2})).sum().backward();
                        }),
               std::runtime_error);
}

TEST(DistributedDataParallelTest, goes_before_its_module) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear net(2, 2);
    std::optional<DistributedDataParallel<torch::nn::Linear>> model(net);
    const Tensor y = (*model)(at::full({1, 2}, rank + 1.0));
    model.reset();
    y.sum().backward();  // the graph outlives the hooks: nobody averages
    EXPECT_TRUE(net->weight.grad().eq(rank + 1).all().item<bool>());
  });
}

TEST(DistributedDataParallelTest, without_ranks_it_is_the_module) {
  torch::nn::Linear net(2, 2);
  DistributedDataParallel model(net);
  const Tensor x = Random(1).normal({3, 2}, at::kFloat);
  EXPECT_TRUE(model(x).equal(net(x)));
  model(x).sum().backward();
  EXPECT_TRUE(net->bias.grad().eq(3).all().item<bool>());
}

}  // namespace
}  // namespace lockstep::nn
