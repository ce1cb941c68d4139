#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <limits>
#include <lockstep/engine.hpp>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "helpers.hpp"
#include "support/expect.hpp"
#include "support/ranks.hpp"
#include "training.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::difference;
using testing::on_ranks;
using testing::Random;
using testing::Shares;

/// A batch-normalised network, its parameters in several buckets.
testing::Training training_of(const Shares& shares) {
  using namespace torch::nn;  // NOLINT: the net reads as it would in a program
  testing::Training training;
  training.make_net = [](std::uint64_t seed) {
    Sequential net(Conv2d(Conv2dOptions(1, 6, 3).padding(1)), BatchNorm2d(6), ReLU(),
                   Conv2d(Conv2dOptions(6, 8, 3).stride(2).bias(false)), BatchNorm2d(8), ReLU(),
                   Flatten(), Linear(72, 16), BatchNorm1d(16), ReLU(), Linear(16, 10));
    net->to(at::kDouble);
    const at::NoGradGuard no_grad;
    Random random(seed);
    for (auto& p : net->parameters()) p.copy_(random.normal(p.sizes()) * 0.2);
    return net;
  };
  training.make_optimizer = testing::make_sgd(0.05, /*weight_decay=*/1e-3);
  training.make_batch = [](Random& random, std::int64_t n) {
    const Tensor images = random.normal({n, 1, 8, 8}) * 2 + 1;
    return testing::Batch{images, random.classes(10, n)};
  };
  training.loss = testing::summed_cross_entropy;
  training.shares = [&shares](int /*epoch*/, int /*batch*/) { return shares; };
  training.n_batches = 50;
  training.ddp = {.bucket_size_mb = 0.002, .first_bucket_size_mb = 0.0005};
  return training;
}

class TrainingTest : public ::testing::TestWithParam<std::tuple<test::Form, Shares>> {
 protected:
  const Shares& shares() const { return std::get<1>(GetParam()); }
  test::Setting setting() const {
    return {std::get<0>(GetParam()), static_cast<int>(shares().size())};
  }
};

TEST_P(TrainingTest, ranks_with_sync_batch_norm_equal_one_rank) {
  testing::expect_like_one_rank(training_of(shares()), setting(), 1e-9);
}

constexpr auto name_of_ranks = [](const auto& test) {
  const auto& [form, shares] = test.param;
  const test::Setting setting{form, static_cast<int>(shares.size())};
  return fmt::format("{}_with_{}", name_of(setting), fmt::join(shares, "_"));
};

INSTANTIATE_TEST_SUITE_P(
    shares, TrainingTest,
    ::testing::Combine(::testing::Values(test::Form::threads, test::Form::processes,
                                         test::Form::hosts, test::Form::gloo),
                       ::testing::Values(Shares{8}, Shares{5, 3}, Shares{8, 0}, Shares{5, 2, 1},
                                         Shares{4, 2, 2}, Shares{3, 2, 2, 1}, Shares{2, 2, 2, 2})),
    name_of_ranks);

/// Shares of 2 or more: plain BatchNorm1d refuses one sample.
class PlainTrainingTest : public TrainingTest {};

TEST_P(PlainTrainingTest, ranks_with_plain_batch_norm_do_not) {
  testing::Training training = training_of(shares());
  training.synchronised = testing::Synchronised::no;
  testing::compare_with_one_rank(training, setting(),
                                 [](double difference) { EXPECT_GE(difference, 1e-3); });
}

INSTANTIATE_TEST_SUITE_P(
    shares, PlainTrainingTest,
    ::testing::Combine(::testing::Values(test::Form::threads, test::Form::processes),
                       ::testing::Values(Shares{5, 3}, Shares{4, 2, 2}, Shares{2, 2, 2, 2})),
    name_of_ranks);

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
  return {.bucket_cap_mb = 1e-6, .first_bucket_cap_mb = 1e-6};
}

TEST(DistributedDataParallelTest, all_ranks_start_from_rank_0) {
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

TEST(DistributedDataParallelTest, unused_parameters_hang_no_rank) {
  on_ranks(2, [](int rank) {
    Linears net;
    auto options = tiny_buckets();
    options.find_unused_parameters = true;
    DistributedDataParallel model(net, options);
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

TEST(DistributedDataParallelTest, a_gradient_on_some_ranks_only_is_reported_on_every_rank) {
  on_ranks(3, [](int rank) {
    for (const bool static_graph : {false, true}) {
      Linears net;
      auto options = tiny_buckets();
      options.static_graph = static_graph;
      DistributedDataParallel model(net, options);
      const Tensor x = at::ones({1, 2});
      try {
        model(x, /*both=*/rank != 1).sum().backward();
        ADD_FAILURE() << "no error";
      } catch (const MismatchError& error) {
        const std::string expected =
            std::string("parameter sometimes.weight got a gradient on 2 of 3 ranks, ") +
            (rank == 1 ? "but not on this one" : "also on this one");
        test::expect_contains(error.text(), expected);
      }
      net->zero_grad();
      model(x, /*both=*/true).sum().backward();  // no rank is out of step
      EXPECT_TRUE(net->sometimes->bias.grad().eq(1).all().item<bool>());
      // What an optimiser has zeroed in place is there, and yet no gradient of this step.
      for (const Tensor& parameter : net->parameters()) {
        if (parameter.grad().defined()) parameter.mutable_grad().zero_();
      }
      EXPECT_THROW(model(x, /*both=*/rank != 1).sum().backward(), MismatchError);
    }
  });
}

/// The ranks that have all gradients have sent them when backward ends, the other has not.
TEST(DistributedDataParallelTest, a_gradient_that_one_rank_lacks_puts_no_rank_out_of_step) {
  on_ranks(3, [](int rank) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
    DistributedDataParallel model(net);
    const auto backward = [&](bool both) {
      net->zero_grad();
      model
          .run([&] {
            const Tensor x = net[0]->as<torch::nn::Linear>()->forward(at::ones({1, 2}));
            return both ? net[1]->as<torch::nn::Linear>()->forward(x).sum() : x.sum();
          })
          .backward();
    };
    backward(true);
    test::expect_contains(test::thrown<MismatchError>([&] { backward(rank != 1); }),
                          "got a gradient on 2 of 3 ranks");
    backward(true);
  });
}

/// If no rank has a gradient, what the program has put there stays: the tensor and its values.
TEST(DistributedDataParallelTest, a_gradient_set_by_hand_is_kept) {
  on_ranks(2, [](int rank) {
    Linears net;
    DistributedDataParallel model(net, tiny_buckets());
    const Tensor x = at::ones({1, 2});
    const Tensor by_hand = at::full({3}, rank + 1.0);
    net->never->bias.mutable_grad() = by_hand;
    for (int step = 0; step < 3; ++step) {
      model(x, /*both=*/true).sum().backward();
      EXPECT_TRUE(net->never->bias.grad().is_same(by_hand)) << step;
      EXPECT_TRUE(by_hand.eq(rank + 1).all().item<bool>()) << by_hand;
    }
    // One that the last step averaged, and this one does not reach.
    net->sometimes->bias.mutable_grad().fill_(rank + 5);
    model(x, /*both=*/false).sum().backward();
    EXPECT_TRUE(net->sometimes->bias.grad().eq(rank + 5).all().item<bool>());
    // With a gradient of this step it counts, as one that is accumulated.
    net->never->bias.mutable_grad() = at::full({3}, rank + 1.0);
    (model(x, /*both=*/true).sum() + net->never(x).sum()).backward();
    EXPECT_TRUE(net->never->bias.grad().eq(2.5).all().item<bool>()) << net->never->bias.grad();
  });
}

TEST(DistributedDataParallelTest, complex_parameters_are_averaged) {
  struct NetImpl : torch::nn::Module {
    Tensor factor = register_parameter("factor", at::ones({2}, at::kComplexDouble));
    torch::nn::Linear real = register_module("real", torch::nn::Linear(2, 2));
    Tensor forward(const Tensor& x) {
      return at::real((x * factor).sum()) + real(at::ones({1, 2})).sum();
    }
  };
  for (const bool has_hook : {false, true}) {
    on_ranks(2, [has_hook](int rank) {
      const auto net = std::make_shared<NetImpl>();
      DistributedDataParallelOptions options;
      if (has_hook) options.comm_hook = bf16_compression();
      DistributedDataParallel model(net, options);
      const auto number = [](double re, double im) {
        return at::complex(at::full({2}, re, at::kDouble), at::full({2}, im, at::kDouble));
      };
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        model(number(1 + 2 * rank, 4 * rank)).backward();
        // The gradient of re(x w) is the conjugate of x.
        EXPECT_TRUE(net->factor.grad().resolve_conj().equal(number(2, -2))) << net->factor.grad();
        EXPECT_TRUE(net->real->bias.grad().eq(1).all().item<bool>());
      }
    });
  }
}

/// Tokens by rank and step; rank 2 has none in step 1.
Tensor tokens_of(int rank, int step) {
  if (rank == 2 && step == 1) return at::empty({0}, at::kLong);
  return at::tensor({rank, rank, 3 + step}, at::kLong);
}

struct TokensImpl : torch::nn::Module {
  torch::nn::Embedding table{nullptr};
  torch::nn::EmbeddingBag bag{nullptr};
  torch::nn::Linear head = register_module("head", torch::nn::Linear(4, 1));
  explicit TokensImpl(bool sparse) {
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 4).sparse(sparse)));
    bag = register_module(
        "bag", torch::nn::EmbeddingBag(
                   torch::nn::EmbeddingBagOptions(7, 4).sparse(sparse).mode(torch::kSum)));
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    Random random(5);
    for (auto& parameter : parameters()) parameter.copy_(random.normal(parameter.sizes()));
  }
  Tensor forward(const Tensor& tokens) {
    const Tensor bags = bag(tokens, at::zeros({1}, at::kLong));
    return (head(table(tokens)).square().sum() + head(bags).square().sum());
  }
};
TORCH_MODULE(Tokens);

TEST(DistributedDataParallelTest, sparse_gradients_are_averaged) {
  for (const bool has_hook : {false, true}) {
    on_ranks(3, [has_hook](int rank) {
      std::vector<std::vector<Tensor>> results;
      for (const bool sparse : {false, true}) {
        Tokens net(sparse);
        auto options = tiny_buckets();
        if (has_hook) {
          options.comm_hook = [](const GradientBucket& bucket) -> std::function<void()> {
            Work work =
                bucket.group.all_reduce_async(elements_of(bucket.gradients), ReduceOp::mean);
            return [work]() mutable { work.wait(); };
          };
        }
        DistributedDataParallel model(net, options);
        torch::optim::SGD optimizer(net->parameters(), 0.01);
        auto& result = results.emplace_back();
        for (int step = 0; step < 4; ++step) {
          if (step != 3) optimizer.zero_grad();  // step 3 accumulates
          model(tokens_of(rank, step)).backward();
          EXPECT_EQ(net->table->weight.grad().is_sparse(), sparse);
          EXPECT_EQ(net->bag->weight.grad().is_sparse(), sparse);
          optimizer.step();
        }
        assert_in_sync(net);
        for (const Tensor& parameter : net->parameters()) {
          result.push_back(parameter.detach());
          result.push_back(parameter.grad().to_dense());
        }
      }
      for (std::size_t i = 0; i < results[0].size(); ++i) {
        EXPECT_LE(difference(results[0][i], results[1][i]), 1e-12) << i;
      }
    });
  }
}

TEST(DistributedDataParallelTest, a_sparse_gradient_of_another_layer_is_rejected) {
  struct NetImpl : torch::nn::Module {
    Tensor table = register_parameter("table", at::ones({7, 4}));
    Tensor forward(const Tensor& tokens) {
      return at::embedding(table, tokens, /*padding_idx=*/-1, /*scale_grad_by_freq=*/false,
                           /*sparse=*/true);
    }
  };
  DistributedDataParallel model(std::make_shared<NetImpl>());
  const Tensor loss = model(tokens_of(0, 0)).sum();
  const std::string text = testing::usage_error([&] { loss.backward(); });
  test::expect_contains(text, "the gradient of table is sparse");
}

/// Before anything is sent.
TEST(DistributedDataParallelTest, what_cannot_be_sent_is_named) {
  const auto error_of = [](const std::function<void(torch::nn::Module&)>& add) {
    const auto net = std::make_shared<torch::nn::Module>();
    net->register_parameter("fine", at::ones({2}));
    add(*net);
    return testing::usage_error([&] { const DistributedDataParallel model(net); });
  };
  for (const bool requires_grad : {false, true}) {
    const std::string text = error_of([&](torch::nn::Module& net) {
      net.register_parameter("odd", at::eye(2).to_sparse(), requires_grad);
    });
    test::expect_contains(text, {"parameter odd", "Sparse"});
  }
  for (const Tensor& odd :
       {at::eye(2).to_sparse(), at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8)}) {
    test::expect_contains(
        error_of([&](torch::nn::Module& net) { net.register_buffer("odd", odd); }), "buffer odd");
  }
}

/// With one rank, none can be out of step.
TEST(DistributedDataParallelTest, a_rank_alone_goes_on_after_an_exception) {
  struct NetImpl : torch::nn::Module {
    torch::nn::Linear first = register_module("first", torch::nn::Linear(2, 3)),
                      second = register_module("second", torch::nn::Linear(3, 3));
    Tensor forward(const Tensor& x) { return second(first(x)); }
  };
  const auto net = std::make_shared<NetImpl>();
  DistributedDataParallel model(net, tiny_buckets());
  bool fails = true;
  net->first->weight.register_hook([&fails](const Tensor& /*gradient*/) {
    if (fails) throw std::runtime_error("not now");
  });
  for (int step = 0; step < 3; ++step) {
    fails = step < 2;
    net->zero_grad();
    const Tensor loss = model(at::ones({1, 2})).sum();
    if (fails) {
      EXPECT_THROW(loss.backward(), std::runtime_error);
    } else {
      loss.backward();
    }
  }
  const auto expected = std::make_shared<NetImpl>();
  {
    const at::NoGradGuard no_grad;
    for (const auto& item : net->named_parameters()) {
      expected->named_parameters()[item.key()].copy_(*item);
    }
  }
  expected->forward(at::ones({1, 2})).sum().backward();
  for (const auto& item : net->named_parameters()) {
    EXPECT_LE(difference(item->grad(), expected->named_parameters()[item.key()].grad()), 1e-6)
        << item.key();
  }
}

TEST(DistributedDataParallelTest, invalid_bucket_size) {
  const double nan = std::nan("");
  for (const double size : {-1.0, nan}) {
    for (const bool first : {true, false}) {
      DistributedDataParallelOptions options;
      (first ? options.first_bucket_cap_mb : options.bucket_cap_mb) = size;
      const std::string text = testing::usage_error(
          [&] { const DistributedDataParallel model(torch::nn::Linear(2, 1), options); });
      EXPECT_EQ(text.find(first ? "first_bucket_cap_mb is " : "bucket_cap_mb is "), 0U) << text;
      test::expect_contains(text, "infinity");
    }
  }
  for (const double size : {0.0, std::numeric_limits<double>::infinity()}) {
    const DistributedDataParallel model(torch::nn::Linear(2, 1),
                                        {.bucket_cap_mb = size, .first_bucket_cap_mb = size});
  }
}

TEST(DistributedDataParallelTest, former_names_of_options_are_accepted) {
  std::size_t n_buckets = 0;
  DistributedDataParallelOptions options{.bucket_size_mb = 0, .first_bucket_size_mb = 0};
  options.hook = [&](const GradientBucket& /*bucket*/) -> std::function<void()> {
    ++n_buckets;
    return [] {};
  };
  DistributedDataParallel model(torch::nn::Linear(2, 1), options);
  model(at::ones({1, 2})).sum().backward();
  EXPECT_EQ(n_buckets, 2U);  // one for each parameter, not one of 25 MiB
}

TEST(DistributedDataParallelTest, parameters_on_several_devices_are_rejected) {
  struct Net : torch::nn::Module {
    Net() {
      register_parameter("here", at::zeros({2}));
      register_parameter("there", at::empty({2}, at::kMeta));
    }
  };
  test::expect_contains(test::thrown<UsageError>(
                            [&] { const DistributedDataParallel model(std::make_shared<Net>()); }),
                        "parameter here is on cpu, there on meta");
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

struct TiedImpl : torch::nn::Module {
  torch::nn::Linear encoder{2, 2}, between{2, 2}, decoder = encoder;
  explicit TiedImpl(bool is_tied = true) {
    if (!is_tied) decoder = torch::nn::Linear(2, 2);
    register_module("encoder", encoder);
    register_module("between", between);
    register_module("decoder", decoder);
  }
  Tensor forward(const Tensor& x) { return decoder(between(encoder(x))); }
};
TORCH_MODULE(Tied);

using Make = std::function<std::shared_ptr<torch::nn::Module>(bool is_last_rank)>;

/// A module with a parameter "a", and one more that `add` gives to the last rank only.
Make with_another(std::function<void(torch::nn::Module&)> add) {
  return [add = std::move(add)](bool is_last_rank) {
    const auto net = std::make_shared<torch::nn::Module>();
    net->register_parameter("a", at::ones({2}));
    if (is_last_rank) {
      add(*net);
    } else {
      net->register_parameter("b", at::ones({3}));
    }
    return net;
  };
}

TEST(DistributedDataParallelTest, a_difference_of_any_kind_is_named_on_every_rank) {
  struct Case {
    Make make;
    std::string expected, got;  ///< on rank 0, and on rank 2
  };
  const auto b_and = [](std::function<void(torch::nn::Module&)> add, const char* got) {
    return Case{with_another(std::move(add)), "parameter b Float [3]", got};
  };
  const std::vector<Case> cases{
      b_and([](auto& net) { net.register_parameter("c", at::ones({3})); }, "parameter c Float [3]"),
      b_and([](auto& net) { net.register_parameter("b", at::ones({3}, at::kDouble)); },
            "parameter b Double [3]"),
      b_and(
          [](auto& net) {
            net.register_parameter("b", at::ones({1, 3}));
          },
          "parameter b Float [1, 3]"),
      b_and([](auto& net) { net.register_parameter("b", at::ones({3}), /*requires_grad=*/false); },
            "parameter b Float [3] frozen"),
      b_and([](auto& net) { net.register_buffer("b", at::ones({3})); }, "buffer b Float [3]"),
      b_and([](auto& /*net*/) {}, "nothing more"),
      {[](bool is_last) {
         return torch::nn::Sequential(torch::nn::Linear(2, 3),
                                      torch::nn::Linear(3, is_last ? 4 : 3))
             .ptr();
       },
       "parameter 1.weight Float [3, 3]", "parameter 1.weight Float [4, 3]"},
      // Gradients are averaged in the order of memory.
      {[](bool is_last) {
         torch::nn::Conv2d net(torch::nn::Conv2dOptions(3, 4, 2));
         if (!is_last) net->weight.set_data(testing::channels_last(net->weight.detach()));
         return net.ptr();
       },
       "parameter weight Float [4, 3, 2, 2] with strides [12, 1, 6, 3]",
       "parameter weight Float [4, 3, 2, 2]"},
      {[](bool is_last) { return Tied(/*is_tied=*/!is_last).ptr(); },
       "parameter decoder.weight Float [2, 2], the same tensor as encoder.weight",
       "parameter decoder.weight Float [2, 2]"}};
  for (const Case& c : cases) {
    on_ranks(3, [&c](int rank) {
      const auto net = c.make(rank == 2);
      const std::string text =
          test::thrown<MismatchError>([&] { const DistributedDataParallel model(net); });
      test::expect_contains(text, "rank 0 has " + c.expected + ", rank 2 has " + c.got + ":");
    });
  }
}

/// The hook adds at once, so that what is added twice is twice as large.
TEST(DistributedDataParallelTest, a_layer_under_two_names_is_averaged_once) {
  for (const bool has_hook : {false, true}) {
    on_ranks(2, [has_hook](int rank) {
      Tied net;
      net->to(at::kDouble);
      const Tensor x0 = Random(1).normal({3, 2}), x1 = Random(2).normal({3, 2});
      auto options = tiny_buckets();
      const auto add = [](const GradientBucket& bucket) -> std::function<void()> {
        bucket.group.all_reduce_async(elements_of(bucket.gradients), ReduceOp::sum).wait();
        return [] {};
      };
      if (has_hook) options.comm_hook = add;
      DistributedDataParallel model(net, options);
      const std::vector<Tensor> parameters{net->encoder->weight, net->encoder->bias,
                                           net->between->weight, net->between->bias};
      for (int step = 0; step < 3; ++step) {
        const auto loss = [&](const Tensor& x) { return net->forward(x).square().sum(); };
        const Tensor expected_loss = (loss(x0) + loss(x1)) / (has_hook ? 1 : 2);
        const auto expected = torch::autograd::grad({expected_loss}, parameters);
        net->zero_grad();
        model(rank == 0 ? x0 : x1).square().sum().backward();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          EXPECT_LE(difference(parameters[i].grad(), expected[i]), 1e-9) << i << " in " << step;
        }
      }
    });
  }
}

TEST(DistributedDataParallelTest, a_gradient_with_a_graph_is_rejected) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    {
      const at::NoGradGuard no_grad;
      net->weight.fill_(1);
    }
    const Tensor x = at::full({1, 1}, rank + 1.0);
    {
      DistributedDataParallel model(net);
      const std::string text = testing::usage_error([&] {
        model(x).square().sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      });
      test::expect_contains(text, {"the gradient of weight has a graph", "torch::autograd::grad"});
      net->weight.mutable_grad().reset();  // it holds the graph, which holds the weight
    }
    DistributedDataParallel model(net);
    const Tensor loss = model(x).square().sum();  // (w * x)^2
    const auto gradients = torch::autograd::grad({loss}, {net->weight}, /*grad_outputs=*/{},
                                                 /*retain_graph=*/true, /*create_graph=*/true);
    (loss + gradients[0].square().sum()).backward();  // 2 w x^2 + 8 w x^4, of 1 and of 2
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), (10 + 136) / 2.0F);
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

/// The all_reduce that notices runs on the group's worker.
TEST(DistributedDataParallelTest, a_peer_killed_in_backward_is_reported_by_backward) {
  const auto statuses = test::run_processes(2, [] {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::Linear(3, 3));
    DistributedDataParallel model(net, tiny_buckets());
    model(at::ones({1, 2})).sum().backward();  // the first one also talks after the worker's calls
    Tensor y = model(at::ones({1, 2}));
    if (get_rank() == 1) {
      y.register_hook([](const Tensor& gradient) {
        ::raise(SIGKILL);
        return gradient;
      });
    }
    test::expect_contains(test::thrown<PeerLost>([&] { y.sum().backward(); }),
                          "rank 1 was killed by signal 9");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, SIGKILL}));
}

TEST(DistributedDataParallelTest, an_exception_of_a_hook_reaches_backward) {
  for (const bool is_late : {false, true}) {
    on_ranks(2, [is_late](int /*rank*/) {
      torch::nn::Linear net(2, 3);
      DistributedDataParallelOptions options;
      options.comm_hook = [is_late](const GradientBucket& /*bucket*/) -> std::function<void()> {
        if (!is_late) throw std::out_of_range("at once");
        return [] { throw std::out_of_range("at its end"); };
      };
      DistributedDataParallel model(net, options);
      try {
        model(at::ones({1, 2})).sum().backward();
        ADD_FAILURE() << "no error";
      } catch (const std::out_of_range& error) {
        EXPECT_STREQ(error.what(), is_late ? "at its end" : "at once");
      }
    });
  }
}

TEST(DistributedDataParallelTest, gradients_are_the_buckets_memory) {
  on_ranks(2, [](int rank) {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::Linear(3, 3));
    DistributedDataParallel model(net);
    std::vector<void*> addresses;
    for (int step = 0; step < 4; ++step) {
      for (auto& parameter : net->parameters()) {
        if (parameter.grad().defined()) parameter.mutable_grad().zero_();
      }
      model(at::full({1, 2}, rank + 1.0)).sum().backward();
      std::vector<void*> now;
      for (const auto& parameter : net->parameters()) now.push_back(parameter.grad().data_ptr());
      // The first step made the buckets anew, the second moved into them.
      if (step >= 2) {
        EXPECT_EQ(now, addresses) << "a gradient was copied";
      }
      addresses = now;
      const auto* const lowest = static_cast<char*>(*std::min_element(now.begin(), now.end()));
      const auto* const highest = static_cast<char*>(*std::max_element(now.begin(), now.end()));
      EXPECT_LE(highest - lowest, 4 * 64) << "one behind the other";
    }
  });
}

TEST(DistributedDataParallelTest, a_gradient_that_is_kept_keeps_its_values) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear net(2, 2);
    DistributedDataParallel model(net);
    std::vector<Tensor> kept, views;
    for (int step = 0; step < 5; ++step) {
      for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
      model(at::full({1, 2}, rank + 2.0 * step)).sum().backward();
      if (step < 3) kept.push_back(net->weight.grad());  // in step 3 only a view is left
      views.push_back(net->weight.grad().view(-1));
      if (step == 3) kept.push_back(net->weight.grad().detach());
    }
    for (std::size_t step = 0; step < kept.size(); ++step) {
      const double expected = 0.5 + 2.0 * static_cast<double>(step);
      EXPECT_TRUE(kept[step].eq(expected).all().item<bool>()) << step << ": " << kept[step];
      EXPECT_TRUE(views[step].eq(expected).all().item<bool>()) << step << ": " << views[step];
    }
  });
}

/// Used in the opposite order of their registration, and a third that is not used.
struct CrossedImpl : torch::nn::Module {
  torch::nn::Linear late{2, 2}, early{2, 2}, never{2, 2};
  explicit CrossedImpl(bool registers = true) {
    register_module("late", late);
    register_module("early", early);
    if (registers) register_module("never", never);
  }
  Tensor forward(const Tensor& x) { return late(early(x)); }
};
TORCH_MODULE(Crossed);

TEST(DistributedDataParallelTest, buckets_are_rebuilt_in_the_order_of_rank_0) {
  on_ranks(2, [](int) {
    Crossed net;
    std::vector<std::size_t> n_elements;  // of the buckets in the order of sending
    auto options = tiny_buckets();
    options.comm_hook = [&](const GradientBucket& bucket) -> std::function<void()> {
      EXPECT_EQ(bucket.index, n_elements.size());
      n_elements.push_back(static_cast<std::size_t>(bucket.gradients.numel()));
      Work work = bucket.group.all_reduce_async(elements_of(bucket.gradients), ReduceOp::mean);
      return [work]() mutable { work.wait(); };
    };
    DistributedDataParallel model(net, options);
    // Each bucket has one parameter; which one shows where its gradient lies.
    const Tensor x = at::ones({1, 2});
    const auto addresses = [&] {
      model(x).sum().backward();
      return std::pair(net->late->weight.grad().data_ptr(), net->early->weight.grad().data_ptr());
    };
    const auto first = addresses();
    EXPECT_EQ(n_elements.size(), 6U);
    n_elements.clear();
    const auto second = addresses();
    EXPECT_EQ(n_elements.size(), 6U);
    EXPECT_NE(first, second) << "other buckets";
    n_elements.clear();
    EXPECT_EQ(addresses(), second) << "rebuilt once";
    EXPECT_TRUE(net->late->bias.grad().eq(3).all().item<bool>());
  });
}

struct EitherFirstImpl : torch::nn::Module {
  torch::nn::Linear a{2, 2}, b{2, 2};
  EitherFirstImpl() {
    register_module("a", a);
    register_module("b", b);
  }
  Tensor forward(const Tensor& x, bool a_first) { return a_first ? b(a(x)) : a(b(x)); }
};
TORCH_MODULE(EitherFirst);

TEST(DistributedDataParallelTest, ranks_whose_gradients_come_in_other_orders) {
  on_ranks(3, [](int rank) {
    EitherFirst net, alone;
    DistributedDataParallel model(net, tiny_buckets());
    const Tensor x = at::full({1, 2}, rank + 1.0);
    for (int step = 0; step < 3; ++step) {
      for (const auto& item : net->named_parameters()) {
        alone->named_parameters()[item.key()].set_data(item->detach());
      }
      net->zero_grad();
      alone->zero_grad();
      model(x, /*a_first=*/rank != 1).square().sum().backward();
      alone(x, /*a_first=*/rank != 1).square().sum().backward();
      for (const auto& item : alone->named_parameters()) {
        all_reduce(item->mutable_grad(), ReduceOp::mean);
        EXPECT_LE(difference(net->named_parameters()[item.key()].grad(), item->grad()), 1e-5)
            << item.key() << " in step " << step;
      }
    }
  });
}

TEST(DistributedDataParallelTest, a_static_graph_does_not_wait_for_the_unused) {
  on_ranks(2, [](int) {
    for (const bool is_static : {false, true}) {
      Crossed net;
      std::vector<bool> sent_in_backward;
      bool in_backward = false;
      auto options = tiny_buckets();
      options.static_graph = is_static;
      options.comm_hook = [&](const GradientBucket&) -> std::function<void()> {
        sent_in_backward.push_back(in_backward);
        return [] {};
      };
      DistributedDataParallel model(net, options);
      const Tensor x = at::ones({1, 2});
      for (int step = 0; step < 2; ++step) {
        sent_in_backward.clear();
        in_backward = true;
        const Tensor leaf = x.detach().requires_grad_();
        leaf.register_hook([&](const Tensor&) { in_backward = false; });  // the graph's last node
        model(leaf * 2).sum().backward();
      }
      ASSERT_EQ(sent_in_backward.size(), 6U);
      EXPECT_TRUE(sent_in_backward[0]);
      EXPECT_EQ(sent_in_backward[5], is_static);
      EXPECT_FALSE(net->never->weight.grad().defined());
      if (!is_static) continue;
      net->late->weight.mutable_grad().reset();
      EXPECT_THROW(net->never(model(x)).sum().backward(), UsageError);
    }
  });
}

TEST(DistributedDataParallelTest, hooks_compress_and_may_do_anything) {
  on_ranks(3, [](int rank) {
    const auto gradient = [&](const CommunicationHook& hook, double value) {
      torch::nn::Linear net(torch::nn::LinearOptions(1, 2).bias(false));
      DistributedDataParallelOptions options;
      options.comm_hook = hook;
      DistributedDataParallel model(net, options);
      model(at::full({1, 1}, value)).sum().backward();
      EXPECT_EQ(net->weight.grad().scalar_type(), at::kFloat);
      return net->weight.grad()[1].item<double>();
    };
    const double value = 1.0 / 3 + rank;
    EXPECT_NEAR(gradient({}, value), 4.0 / 3, 1e-6);
    EXPECT_NEAR(gradient(f16_compression(), value), 4.0 / 3, 1e-3);
    EXPECT_NE(gradient(f16_compression(), value), gradient({}, value));
    EXPECT_NEAR(gradient(bf16_compression(), value), 4.0 / 3, 1e-2);
    EXPECT_NE(gradient(bf16_compression(), value), gradient(f16_compression(), value));
    const CommunicationHook largest = [](const GradientBucket& bucket) -> std::function<void()> {
      Work work = bucket.group.all_reduce_async(elements_of(bucket.gradients), ReduceOp::max);
      return [work, gradients = bucket.gradients]() mutable {
        work.wait();
        gradients.mul_(10);
      };
    };
    EXPECT_NEAR(gradient(largest, value), 70.0 / 3, 1e-5);
  });
}

/// What happened, in its order.
class Trace {
 public:
  void clear() {
    const std::lock_guard lock(mutex_);
    events_.clear();
  }
  void add(std::string event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    changed_.notify_all();
  }
  /// Until something has happened; or for ever, which the watchdog ends.
  void wait_for_first() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, testing::kWatchdog, [this] { return !events_.empty(); });
  }
  std::vector<std::string> events() {
    const std::lock_guard lock(mutex_);
    return events_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> events_;
};

/// The engine of a group over another group, which traces the end of each all_reduce and whether
/// its data lay in allocated memory. Of the other operations it has what DistributedDataParallel
/// needs.
class TracedEngine final : public Engine {
 public:
  TracedEngine(Group group, Trace& trace) : group_(std::move(group)), trace_(trace) {}
  std::string_view name() const noexcept override { return "traced"; }
  int rank() const noexcept override { return group_.rank(); }
  int size() const noexcept override { return group_.size(); }
  void run(const Call& call) override {
    const Elements out{call.out, call.count, call.dtype};
    if (call.op == Op::all_reduce) {
      group_.all_reduce(out, call.reduce);
      trace_.add(is_allocated(call.out) ? "all_reduce" : "all_reduce of other memory");
    } else if (call.op == Op::broadcast) {
      group_.broadcast(out, call.root);
    } else if (call.op == Op::barrier) {
      group_.barrier();
    } else if (call.op == Op::all_gather) {
      std::vector<std::size_t> counts(call.counts.begin(), call.counts.end());
      counts.resize(static_cast<std::size_t>(size()), call.count);
      const auto total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
      group_.all_gather({call.in, counts[static_cast<std::size_t>(rank())], call.dtype},
                        {call.out, total, call.dtype}, counts);
    } else {
      throw EngineError(context_of(call, rank()), "not traced");
    }
  }
  std::unique_ptr<Engine> split(const Call& /*call*/, int color, int key) override {
    return std::make_unique<TracedEngine>(group_.split(color, key), trace_);
  }
  std::unique_ptr<SharedMemory> allocate(const Call& call) override {
    allocated_.push_back(group_.allocate(call.count));
    return std::make_unique<Memory>(allocated_.back());
  }
  void abandon(std::string_view /*reason*/) noexcept override {}
  void leave(std::string_view /*failure*/) noexcept override {}

 private:
  class Memory final : public SharedMemory {
   public:
    explicit Memory(SharedBuffer buffer) : buffer_(std::move(buffer)) {}
    std::byte* data() const noexcept override { return buffer_.data(); }

   private:
    SharedBuffer buffer_;
  };

  bool is_allocated(const void* address) const {
    return std::any_of(allocated_.begin(), allocated_.end(), [address](const auto& buffer) {
      return address >= buffer.data() && address < buffer.data() + buffer.size();
    });
  }

  Group group_;
  Trace& trace_;
  std::vector<SharedBuffer> allocated_;
};

/// No measurement: the last node of backward waits for the first bucket's all_reduce. If that began
/// only after backward, the trace would have the end of backward first.
TEST(DistributedDataParallelTest, the_first_bucket_arrives_before_backward_ends) {
  for (const bool has_hook : {false, true}) {
    on_ranks(3, [has_hook](int rank) {
      Trace trace;
      torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::Linear(3, 3));
      auto options = tiny_buckets();
      options.group = Group(std::make_unique<TracedEngine>(default_group(), trace), "traced",
                            testing::kWatchdog);
      if (has_hook) {
        options.comm_hook = [](const GradientBucket& bucket) -> std::function<void()> {
          Work work = bucket.group.all_reduce_async(elements_of(bucket.gradients), ReduceOp::mean);
          return [work]() mutable { work.wait(); };
        };
      }
      DistributedDataParallel model(net, options);
      for (int step = 0; step < 2; ++step) {
        const Tensor x = at::full({1, 2}, rank + 1.0).requires_grad_();
        x.register_hook([&](const Tensor&) {
          for (const auto& parameter : net->parameters()) {
            EXPECT_TRUE(parameter.grad().defined()) << "this is the last node";
          }
          trace.wait_for_first();
          trace.add("end of backward");
        });
        for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
        trace.clear();
        model(x * 2).sum().backward();
        const auto events = trace.events();
        EXPECT_EQ(events.front(), "all_reduce");
        EXPECT_EQ(std::count(events.begin(), events.end(), "end of backward"), 1);
        // A bucket per parameter, in memory of the group; a hook's flags go by themselves.
        EXPECT_EQ(std::count(events.begin(), events.end(), "all_reduce"), has_hook ? 8 : 4);
        EXPECT_EQ(events.size(), has_hook ? 9U : 5U);
        EXPECT_TRUE(net->ptr(1)->named_parameters()["bias"].grad().eq(1).all().item<bool>());
      }
    });
  }
}

TEST(DistributedDataParallelTest, hooks_and_unused_parameters) {
  on_ranks(2, [](int rank) {
    Linears net;
    auto options = tiny_buckets();
    options.find_unused_parameters = true;
    options.comm_hook = bf16_compression();
    DistributedDataParallel model(net, options);
    model(at::ones({1, 2}), /*both=*/rank == 1).sum().backward();
    EXPECT_TRUE(net->sometimes->bias.grad().eq(0.5).all().item<bool>());
    EXPECT_FALSE(net->never->bias.grad().defined());
  });
}

TEST(DistributedDataParallelTest, several_forwards_before_one_backward_and_one_each) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(net);
    const auto forward = [&](double x) { return model(at::full({1, 1}, x)).sum(); };
    (forward(1) * forward(rank) / net->weight.detach()).sum().backward();  // w * rank
    EXPECT_NEAR(net->weight.grad().item<float>(), 1, 1e-5);                // 2 * mean(0, 1)
    net->zero_grad();
    const Tensor first = forward(2 * rank), second = forward(4);
    second.backward();
    EXPECT_EQ(net->weight.grad().item<float>(), 4);
    first.backward();
    EXPECT_EQ(net->weight.grad().item<float>(), 5);
  });
}

TEST(DistributedDataParallelTest, parameters_frozen_thawed_and_added_later) {
  on_ranks(2, [](int rank) {
    Crossed net(/*registers=*/false);
    net->early->bias.requires_grad_(false);
    DistributedDataParallel model(net);
    const auto step = [&] {
      for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
      model(at::full({1, 2}, 1.0 * rank)).sum().backward();
    };
    step();
    net->late->weight.requires_grad_(false);  // frozen
    step();
    EXPECT_FALSE(net->late->weight.grad().defined());
    EXPECT_TRUE(net->late->bias.grad().eq(1).all().item<bool>());
    net->late->weight.requires_grad_(true);
    net->early->bias.requires_grad_(true);  // thawed: was not there at construction
    step();
    EXPECT_TRUE(net->late->weight.grad().defined());
    Tensor other = net->early->bias.grad().clone();
    broadcast(other, /*src=*/1);
    EXPECT_TRUE(other.equal(net->early->bias.grad()));
    net->register_module("never", net->never);  // added
    {
      const at::NoGradGuard no_grad;
      net->never->weight.fill_(rank + 3);
    }
    step();
    EXPECT_TRUE(net->never->weight.eq(3).all().item<bool>()) << "rank 0's";
  });
}

TEST(DistributedDataParallelTest, a_parameter_added_on_one_rank_only) {
  EXPECT_THROW(on_ranks(2,
                        [](int rank) {
                          Crossed net(/*registers=*/false);
                          DistributedDataParallel model(net);
                          if (rank == 1) net->register_module("never", net->never);
                          model(at::ones({1, 2})).sum().backward();
                        }),
               MismatchError);
}

TEST(DistributedDataParallelTest, buffers_of_rank_0_if_asked) {
  for (const bool asked : {false, true}) {
    on_ranks(2, [asked](int rank) {
      torch::nn::BatchNorm1d net(2);
      DistributedDataParallelOptions options;
      options.broadcast_buffers = asked;
      DistributedDataParallel model(net, options);
      net->running_mean.fill_(rank + 1);
      net->eval();
      const Tensor y = model(at::ones({2, 2}));
      EXPECT_EQ(net->running_mean[0].item<float>(), asked ? 1 : rank + 1);
    });
  }
}

TEST(DistributedDataParallelTest, clipping_sees_synchronised_gradients) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear net(2, 2);
    DistributedDataParallel model(net);
    model(at::full({1, 2}, 10.0 * (rank + 1))).sum().backward();
    double norm = torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    double other = norm;
    lockstep::broadcast(std::span(&other, 1), /*src=*/1);
    EXPECT_EQ(norm, other);
    EXPECT_NEAR(norm, std::sqrt(4 * 15.0 * 15.0 + 2), 1e-3);
    double clipped = 0;
    for (const auto& p : net->parameters()) clipped += p.grad().square().sum().item<double>();
    EXPECT_NEAR(clipped, 1, 1e-3);
  });
}

TEST(DistributedDataParallelTest, join_divides_by_all_or_by_the_active) {
  for (const bool by_active : {false, true}) {
    on_ranks(3, [by_active](int rank) {
      torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
      DistributedDataParallelOptions options;
      options.join_divides_by_active = by_active;
      DistributedDataParallel model(net, options);
      std::vector<float> gradients;
      const Tensor x = at::full({2, 1}, 3.0 * (rank + 1));
      model.join(
          [&] {
            for (int i = 0; i < rank; ++i) {  // rank 0 has nothing at all
              net->zero_grad();
              model(x).mean().backward();
              gradients.push_back(net->weight.grad().item<float>());
              const at::NoGradGuard no_grad;
              net->weight.fill_(10 * rank + i);
            }
          },
          {.example_input = x});
      if (rank == 2) {
        ASSERT_EQ(gradients.size(), 2U);
        EXPECT_FLOAT_EQ(gradients[0], by_active ? 15.0F / 2 : 15.0F / 3);
        EXPECT_FLOAT_EQ(gradients[1], by_active ? 9.0F : 9.0F / 3);
      }
      EXPECT_EQ(net->weight.item<float>(), 21) << "of the rank that trained longest";
    });
  }
}

TEST(DistributedDataParallelTest, join_rejects_unsupported_forwards) {
  EXPECT_THROW(on_ranks(2,
                        [](int rank) {
                          torch::nn::Linear net(1, 1);
                          DistributedDataParallel model(net);
                          model.join([&] {
                            if (rank == 1) model(at::ones({1, 1})).sum().backward();
                          });
                        }),
               UsageError);
  EXPECT_THROW(on_ranks(2,
                        [](int rank) {
                          torch::nn::Linear net(1, 1);
                          DistributedDataParallel model(net);
                          model.join([&] {
                            if (rank == 1) {
                              const auto no_sync = model.no_sync();
                              model(at::ones({1, 1})).sum().backward();
                            } else {
                              model(at::ones({1, 1})).sum().backward();
                            }
                          });
                        }),
               MismatchError);
}

TEST(DistributedDataParallelTest, destroyed_before_module) {
  on_ranks(2, [](int rank) {
    torch::nn::Linear net(2, 2);
    std::optional<DistributedDataParallel<torch::nn::Linear>> model(net);
    const Tensor y = (*model)(at::full({1, 2}, rank + 1.0));
    model.reset();
    y.sum().backward();  // the graph outlives the hooks: nothing is averaged
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
