// DistributedDataParallel::join: ranks with different numbers of batches.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <lockstep/objects.hpp>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "helpers.hpp"
#include "support/expect.hpp"
#include "training.hpp"

namespace lockstep::nn {
namespace join_test {

using at::Tensor;
using testing::difference;
using testing::on_ranks;
using testing::Random;
using testing::share_of;
using testing::Shares;
using torch::nn::BatchNorm1d;
using torch::nn::Linear;
using torch::nn::LinearOptions;
using torch::nn::Sequential;

using testing::MakeOptimizer;
using testing::Trainee;

std::unique_ptr<torch::optim::Optimizer> make_adam(const std::vector<Tensor>& parameters) {
  return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.01));
}

std::unique_ptr<torch::optim::Optimizer> make_rmsprop(const std::vector<Tensor>& parameters) {
  return std::make_unique<torch::optim::RMSprop>(
      parameters, torch::optim::RMSpropOptions(0.005).momentum(0.5).centered(true));
}
/// One evaluation of the closure a step: nothing depends on this rank's loss.
std::unique_ptr<torch::optim::Optimizer> make_lbfgs(const std::vector<Tensor>& parameters) {
  return std::make_unique<torch::optim::LBFGS>(
      parameters, torch::optim::LBFGSOptions(0.02).max_iter(1).history_size(3));
}

constexpr int kEpochs = 3;

/// Samples of each rank in a batch: in the last ones some ranks have none, in turns.
Shares shares_of(int epoch, int batch, int n_ranks) {
  Shares shares(static_cast<std::size_t>(n_ranks), 3);
  if (batch < 3) return shares;
  for (int rank = 0; rank < n_ranks; ++rank) {
    if (rank != epoch % n_ranks) shares[static_cast<std::size_t>(rank)] = 0;
  }
  return shares;
}

testing::Training training_of(int n_ranks, const MakeOptimizer& make_optimizer) {
  testing::Training training;
  // No bias in front of the BatchNorm: its gradient is zero but for rounding, which Adam scales up.
  training.make_net = [](std::uint64_t seed) {
    Sequential net(Linear(LinearOptions(4, 6).bias(false)), BatchNorm1d(6), torch::nn::Tanh(),
                   Linear(6, 3));
    net->to(at::kDouble);
    const at::NoGradGuard no_grad;
    Random random(seed);
    for (auto& parameter : net->parameters()) parameter.copy_(random.normal(parameter.sizes()));
    return net;
  };
  training.make_optimizer = make_optimizer;
  training.make_batch = [](Random& random, std::int64_t n) {
    const Tensor x = random.normal({n, 4});
    return testing::Batch{x, random.normal({n, 3})};
  };
  training.loss = [](const Tensor& y, const Tensor& target) { return (y - target).square().sum(); };
  training.shares = [n_ranks](int epoch, int i) { return shares_of(epoch, i, n_ranks); };
  training.n_epochs = kEpochs;
  training.n_batches = 5;
  training.joins = true;
  return training;
}

class JoinTest : public ::testing::TestWithParam<MakeOptimizer> {};

TEST_P(JoinTest, ranks_equal_one_rank_over_epochs) {
  for (const int n_ranks : {2, 3}) {
    testing::expect_like_one_rank(training_of(n_ranks, GetParam()), {test::Form::threads, n_ranks},
                                  1e-9);
  }
}

TEST_P(JoinTest, resumes_with_the_same_bits_on_every_rank) {
  on_ranks(2, [&](int /*rank*/) {
    Trainee training(training_of(2, GetParam()), default_group());
    training.epoch(0);
    std::ostringstream net, optimizer;  // rank 0's serve all
    torch::save(training.net, net);
    torch::save(*training.optimizer, optimizer);
    std::string bytes_of_net = net.str(), bytes_of_optimizer = optimizer.str();
    broadcast_object(bytes_of_net);
    broadcast_object(bytes_of_optimizer);
    training.epoch(1);

    Trainee resumed(training_of(2, GetParam()), default_group());
    std::istringstream from_net(bytes_of_net), from_optimizer(bytes_of_optimizer);
    torch::load(resumed.net, from_net);
    torch::load(*resumed.optimizer, from_optimizer);
    resumed.epoch(1);
    const auto got = resumed.state(), expected = training.state();
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i].equal(expected[i])) << i;
  });
}

TEST_P(JoinTest, an_optimizer_left_out_is_reported_in_the_next_epoch) {
  EXPECT_THROW(on_ranks(2,
                        [&](int /*rank*/) {
                          Trainee training(training_of(2, GetParam()), default_group());
                          for (int epoch = 0; epoch < 2; ++epoch) {
                            try {
                              training.model->join([&] { training.batches(epoch); });
                              EXPECT_EQ(epoch, 0) << "no error";
                            } catch (const MismatchError& error) {
                              EXPECT_EQ(epoch, 1);
                              const std::string what = error.what();
                              test::expect_contains(
                                  what, {"parameter 0.weight of rank 1", "pass join the optimizers",
                                         "join_test.cpp"});
                              throw;
                            }
                          }
                        }),
               MismatchError);
}

std::string name_of_optimizer(const ::testing::TestParamInfo<MakeOptimizer>& one) {
  constexpr std::array kNames{"sgd", "adam", "rmsprop", "lbfgs"};
  return kNames.at(one.index);
}
INSTANTIATE_TEST_SUITE_P(optimizers, JoinTest,
                         ::testing::Values(testing::make_sgd(0.05), make_adam, make_rmsprop,
                                           make_lbfgs),
                         name_of_optimizer);

/// How often it calls the closure depends on the loss, which is another on each rank.
TEST(JoinTest, an_optimizer_that_needs_the_loss_is_rejected) {
  using torch::optim::LBFGSOptions;
  for (const LBFGSOptions& options :
       {LBFGSOptions(0.02), LBFGSOptions(0.02).max_iter(1).line_search_fn("strong_wolfe")}) {
    on_ranks(2, [&](int /*rank*/) {
      const auto make = [&](const std::vector<Tensor>& parameters) {
        return std::make_unique<torch::optim::LBFGS>(parameters, options);
      };
      Trainee training(training_of(2, make), default_group());
      const std::string text = testing::usage_error([&] { training.epoch(0); });
      test::expect_contains(text, {"LBFGS", "max_iter(1)"});
    });
  }
}

TEST(JoinTest, without_state_no_optimizer_is_needed) {
  on_ranks(2, [](int /*rank*/) {
    const auto make = [](const std::vector<Tensor>& parameters) {
      return std::make_unique<torch::optim::SGD>(parameters, 0.05);
    };
    Trainee training(training_of(2, make), default_group());
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      training.model->join([&] { training.batches(epoch); });
    }
    assert_in_sync(*training.model, *training.optimizer);
  });
}

/// The scope is around the forward, in body: a step without samples needs it too.
TEST(JoinTest, steps_without_samples_are_in_the_others_scope) {
  for (const int n_batches_of_rank_1 : {1, 0}) {
    for (const bool around_join : {false, true}) {
      on_ranks(2, [&](int rank) {
        Sequential net(Linear(2, 3), BatchNorm1d(3), Linear(3, 1));
        DistributedDataParallel model(net);
        const Tensor x = Random(static_cast<std::uint64_t>(rank)).normal({4, 2}, at::kFloat);
        const auto train = [&] {
          for (int i = 0; i < (rank == 0 ? 3 : n_batches_of_rank_1); ++i) {
            Tensor y;
            if (around_join) {
              y = model(x);
            } else {
              const SyncBatchNormScope scope;
              y = model(x);
            }
            y.sum().backward();
          }
        };
        if (around_join) {
          const SyncBatchNormScope scope;
          model.join(train, {.example_input = x});
        } else {
          model.join(train, {.example_input = x});
        }
        assert_in_sync(net);
      });
    }
  }
}

TEST(JoinTest, an_example_forward_for_other_arguments) {
  struct NetImpl : torch::nn::Module {
    Linear layer = register_module("layer", Linear(1, 1));
    std::vector<Tensor> forward(const Tensor& x, double factor) { return {layer(x) * factor}; }
  };
  on_ranks(2, [](int rank) {
    const auto net = std::make_shared<NetImpl>();
    DistributedDataParallel model(net);
    const auto train = [&] {
      if (rank == 1) return;
      model(at::ones({2, 1}), 3)[0].sum().backward();
      EXPECT_EQ(net->layer->bias.grad().item<float>(), 3);  // 2 rows, 2 ranks
    };
    model.join(train, {.example_forward = [&] { return net->forward(at::ones({0, 1}), 3)[0]; }});
  });
}

TEST(JoinTest, an_example_forward_ends_with_its_join) {
  struct NetImpl : torch::nn::Module {
    Linear layer = register_module("layer", Linear(1, 1));
    std::vector<Tensor> forward(const Tensor& x) { return {layer(x)}; }
  };
  const auto body = [](int rank) {
    const auto net = std::make_shared<NetImpl>();
    DistributedDataParallel model(net);
    auto example = std::make_shared<Tensor>(at::ones({0, 1}));
    const std::weak_ptr<Tensor> watched = example;
    const auto train = [&] {
      if (rank == 0) model(at::ones({2, 1}))[0].sum().backward();
    };
    {
      JoinOptions options;
      options.example_forward = [net, held = std::move(example)] { return net->forward(*held)[0]; };
      model.join(train, options);
    }
    EXPECT_TRUE(watched.expired());
    if (rank == 0) return model.join(train);
    const std::string text = testing::usage_error([&] { model.join(train); });
    test::expect_contains(text, "Give join an example_input");
    throw std::out_of_range("what ends the other rank's join");
  };
  EXPECT_THROW(on_ranks(2, body), std::out_of_range);
}

using Dict = std::map<std::string, Tensor>;
using Nested = std::tuple<std::vector<Dict>, double>;

/// A forward with any argument that holds tensors.
struct AnyNetImpl : torch::nn::Module {
  Linear layer = register_module("layer", Linear(LinearOptions(1, 1).bias(false)));
  Tensor forward(const std::vector<Tensor>& x) { return layer(x.at(0)); }
  Tensor forward(const std::array<Tensor, 1>& x) { return layer(x[0]); }
  Tensor forward(const std::pair<Tensor, std::string>& x) { return layer(x.first); }
  Tensor forward(const Dict& x) { return layer(x.at("x")); }
  Tensor forward(const Nested& x) { return layer(std::get<0>(x).at(0).at("x")); }
  Tensor forward(const std::optional<Tensor>& x, const std::string& /*mode*/) { return layer(*x); }
};
TORCH_MODULE(AnyNet);

/// Rank 0 has one batch, of large values, and rank 1 three: only in the first do both count.
/// `make`: the tuple of forward's arguments.
template <class Make>
void expect_no_samples_of_rank_0(const Make& make) {
  on_ranks(2, [&](int rank) {
    AnyNet net;
    DistributedDataParallel model(net);
    std::vector<float> gradients;
    model.join([&] {
      for (int step = 0; step < (rank == 0 ? 1 : 3); ++step) {
        net->zero_grad();
        std::apply([&](const auto&... args) { model(args...).sum().backward(); },
                   make(at::full({2, 1}, rank == 0 ? 100.0 : 1.0)));
        gradients.push_back(net->layer->weight.grad().item<float>());
      }
    });
    EXPECT_EQ(gradients, rank == 0 ? std::vector<float>{101} : (std::vector<float>{101, 1, 1}));
  });
}

TEST(JoinTest, steps_without_samples_have_none_in_containers) {
  const std::string text = "train";
  expect_no_samples_of_rank_0([](const Tensor& x) { return std::tuple(std::vector<Tensor>{x}); });
  expect_no_samples_of_rank_0([](const Tensor& x) { return std::tuple(std::array<Tensor, 1>{x}); });
  expect_no_samples_of_rank_0([&](const Tensor& x) { return std::tuple(std::pair(x, text)); });
  expect_no_samples_of_rank_0([](const Tensor& x) { return std::tuple(Dict{{"x", x}}); });
  expect_no_samples_of_rank_0([](const Tensor& x) {
    return std::tuple<Nested>({std::vector<Dict>{{{"x", x}}}, 0.5});
  });
  expect_no_samples_of_rank_0([&](const Tensor& x) { return std::tuple(std::optional(x), text); });
}

/// Such a type may hold tensors of the last batch.
TEST(JoinTest, a_type_of_the_programs_own_needs_an_example) {
  struct Batch {
    Tensor x;
    std::string name;
  };
  struct NetImpl : torch::nn::Module {
    Linear layer = register_module("layer", Linear(1, 1));
    Tensor forward(const Batch& batch) { return layer(batch.x); }
  };
  for (const bool has_example : {false, true}) {
    std::string text = "no error";
    const auto body = [&](int rank) {
      const auto net = std::make_shared<NetImpl>();
      DistributedDataParallel model(net);
      const auto train = [&] {
        for (int step = 0; step < 1 + rank; ++step) {
          net->zero_grad();
          model(Batch{at::ones({2, 1}), "b"}).sum().backward();
        }
        EXPECT_EQ(net->layer->weight.grad().item<float>(), rank == 0 ? 2 : 1);
      };
      JoinOptions options;
      if (has_example) {
        options.example_forward = [&] { return net->forward(Batch{at::ones({0, 1}), "b"}); };
      }
      try {
        model.join(train, options);
      } catch (const UsageError& error) {
        text = error.text();
        throw;
      }
    };
    if (has_example) {
      on_ranks(2, body);
      continue;
    }
    EXPECT_THROW(on_ranks(2, body), UsageError);
    test::expect_contains(text, {"example_forward", "containers of tensors"});
  }
}

/// What a loss adds without looking at the samples is not added for a rank out of data.
TEST(JoinTest, steps_without_samples_add_no_gradient_of_a_penalty) {
  struct NetImpl : torch::nn::Module {
    Linear layer = register_module("layer", Linear(LinearOptions(1, 1).bias(false)));
    Tensor forward(const Tensor& x) { return layer(x).sum() + 10 * layer->weight.sum(); }
  };
  on_ranks(2, [](int rank) {
    const auto net = std::make_shared<NetImpl>();
    DistributedDataParallel model(net);
    model.join([&] {
      for (int step = 0; step < 1 + rank; ++step) {
        net->zero_grad();
        model(at::ones({2, 1})).backward();
        EXPECT_EQ(net->layer->weight.grad().item<float>(), step == 0 ? 12 : 6);
      }
    });
  });
}

/// The other rank gets the text, also if this one catches the exception and goes on.
TEST(JoinTest, an_exception_that_leaves_body_reaches_the_others) {
  for (const bool is_std : {true, false}) {
    std::promise<void> told;
    std::string text = "no error";
    const auto body = [&](int rank) {
      Linear net(2, 1);
      DistributedDataParallel model(net);
      const auto train = [&] {
        for (int step = 0; step < 3; ++step) {
          if (rank == 1 && step == 1) {
            if (is_std) throw std::out_of_range("the file ends here");
            throw 7;
          }
          model(at::ones({2, 2})).sum().backward();
        }
      };
      if (rank == 1) {
        if (is_std) {
          EXPECT_THROW(model.join(train), std::out_of_range);
        } else {
          EXPECT_THROW(model.join(train), int);
        }
        told.get_future().wait();
        return;
      }
      try {
        model.join(train);
      } catch (const Error& error) {
        text = error.what();
      }
      told.set_value();
    };
    run_ranks(2, body, {.timeout = std::chrono::seconds(5)});
    test::expect_contains(text, {"rank 1 failed: ", "body of join"});
    EXPECT_EQ(text.find("the file ends here") != std::string::npos, is_std) << text;
  }
}

TEST(JoinTest, a_join_in_the_body_of_another_is_refused) {
  on_ranks(2, [](int /*rank*/) {
    Linear net(2, 1);
    DistributedDataParallel model(net);
    try {
      model.join([&] { model.join([&] { model(at::ones({2, 2})).sum().backward(); }); });
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      test::expect_contains(error.what(), "in the body of a join");
    } catch (const PeerFailed& error) {  // the other rank's, which came first
      test::expect_contains(error.what(), "in the body of a join");
    }
  });
}

/// A rank out of data takes no part in it.
TEST(JoinTest, communication_in_body_is_named) {
  for (const bool has_layer : {false, true}) {
    std::vector<std::string> texts(2);
    const auto body = [&](int rank) {
      Sequential net(Linear(2, 3));
      if (has_layer) net->push_back(SyncBatchNorm1d(3));
      DistributedDataParallel model(net);
      try {
        model.join([&] {
          for (int step = 0; step < 2 - rank; ++step) {
            Tensor loss = model(at::ones({2, 2})).sum();
            loss.backward();
            if (step == 1) all_reduce(loss);
          }
        });
      } catch (const Error& error) {
        texts[static_cast<std::size_t>(rank)] = error.what();
        throw;
      }
    };
    EXPECT_THROW(run_ranks(2, body, {.timeout = std::chrono::seconds(2)}), Error);
    for (const std::string& text : texts) {
      test::expect_contains(text, "the body of join must not communicate by other means");
    }
  }
}

/// Not that of the library, which makes it.
TEST(JoinTest, the_scope_of_a_step_without_samples_has_the_line_of_join) {
  on_ranks(2, [](int rank) {
    Linear net(2, 3);
    DistributedDataParallel model(net);
    std::vector<SyncBatchNormScope::Settings> scopes;
    JoinOptions options;
    options.example_forward = [&] {
      scopes.push_back(SyncBatchNormScope::active().value());
      return net(at::ones({0, 2}));
    };
    const auto train = [&] {
      if (rank == 1) return;
      const SyncBatchNormScope scope;
      model(at::ones({2, 2})).sum().backward();
    };
    const unsigned line = std::source_location::current().line() + 1;
    model.join(train, options);
    ASSERT_EQ(scopes.size(), rank == 1 ? 1U : 0U);
    for (const auto& scope : scopes) {
      EXPECT_EQ(scope.where.line(), line) << scope.where.file_name();
    }
  });
}

/// Ranks out of data would have to know the groups that others are in.
TEST(JoinTest, a_scope_over_part_of_the_ranks_is_rejected) {
  for (const bool have_all_data : {true, false}) {
    on_ranks(4, [&](int rank) {
      const Group half = default_group().split(rank / 2);
      Sequential net(Linear(2, 3), BatchNorm1d(3), Linear(3, 1));
      DistributedDataParallel model(net);
      const Tensor x = Random(static_cast<std::uint64_t>(rank)).normal({4, 2}, at::kFloat);
      const std::string text = testing::usage_error([&] {
        const SyncBatchNormScope scope(half);
        model.join(
            [&] {
              if (have_all_data || rank >= 2) model(x).sum().backward();
            },
            {.example_input = x});
      });
      test::expect_contains(text, {"a group of 2 of the 4 ranks", "convert_sync_batchnorm"});
    });
  }
}

TEST(JoinTest, layers_over_part_of_the_ranks) {
  on_ranks(4, [](int rank) {
    const Group half = default_group().split(rank / 2);
    Sequential net(Linear(2, 3), BatchNorm1d(3), Linear(3, 1));
    convert_sync_batchnorm(net, half);
    DistributedDataParallel model(net);
    const Tensor x = Random(static_cast<std::uint64_t>(rank)).normal({4, 2}, at::kFloat);
    model.join(
        [&] {
          for (int i = 0; i < rank; ++i) model(x).sum().backward();
        },
        {.example_input = x});
    assert_in_sync(net);
  });
}

/// Uneven data without join: rank 1 has one batch fewer and waits elsewhere. The limit is that of
/// each call; rank 1 waits for longer, so that rank 0 is the one to tell.
TEST(JoinTest, timeout_suggests_join) {
  std::string what;
  const auto body = [&what](int rank) {
    Sequential net(Linear(2, 3), BatchNorm1d(3), Linear(3, 1));
    DistributedDataParallel model(net);
    const Tensor x = at::ones({4, 2});
    try {
      for (int i = 0; i < 3 - rank; ++i) model(x).sum().backward();
      barrier(default_group(), Timeout(testing::kWatchdog));
    } catch (const TimeoutError& error) {
      if (rank == 0) what = error.what();
      throw;
    }
  };
  EXPECT_THROW(run_ranks(2, body, {.timeout = std::chrono::seconds(3)}), TimeoutError);
  test::expect_contains(what, {"Do the ranks have different numbers of batches?", "join()",
                               "averaging the gradients of 2.", " at join_test.cpp:"});
}

/// A wrapper is made by all ranks, whatever their numbers of batches.
TEST(JoinTest, constructor_timeout_does_not_suggest_join) {
  std::string what;
  const auto body = [&what](int rank) {
    const Group other = default_group().duplicate();
    try {
      if (rank == 0) {
        const DistributedDataParallel model(Linear(2, 2));
      }
      barrier(other, Timeout(testing::kWatchdog));
    } catch (const TimeoutError& error) {
      if (rank == 0) what = error.what();
      throw;
    }
  };
  EXPECT_THROW(run_ranks(2, body, {.timeout = std::chrono::seconds(1)}), TimeoutError);
  test::expect_contains(what, "comparing the ranks' modules");
  EXPECT_EQ(what.find("numbers of batches"), std::string::npos) << what;
}

/// The comparison of parameters that follows uneven data does not wait for the other rank there.
TEST(JoinTest, one_rank_alone_evaluates_afterwards) {
  on_ranks(2, [](int rank) {
    Sequential net(Linear(2, 3), Linear(3, 1));
    DistributedDataParallel model(net);
    const Tensor x = at::ones({4, 2});
    model.join([&] {
      for (int i = 0; i < 2 + rank; ++i) model(x).sum().backward();
    });
    for (int step = 0; step < 6; ++step) {
      if (rank == 0) {
        net->eval();
        model(x);  // without NoGradGuard
        net->train();
      }
      model(x).sum().backward();
    }
    assert_in_sync(net);
  });
}

TEST(JoinTest, the_mode_at_the_end_of_body_does_not_matter) {
  for (const int n_batches_of_rank_1 : {1, 0}) {
    on_ranks(2, [&](int rank) {
      Sequential net(Linear(2, 3), BatchNorm1d(3), Linear(3, 3), BatchNorm1d(3), Linear(3, 1));
      convert_sync_batchnorm(net);
      DistributedDataParallel model(net);
      const Tensor x = Random(static_cast<std::uint64_t>(rank)).normal({4, 2}, at::kFloat);
      const auto train = [&] {
        net->train();
        // Frozen: without a batch, rank 1 knows of the mode of the whole net only.
        if (n_batches_of_rank_1 > 0) net->ptr(1)->eval();
        for (int i = 0; i < (rank == 0 ? 3 : n_batches_of_rank_1); ++i) model(x).sum().backward();
        net->eval();
      };
      model.join(train, {.example_input = x});
      for (const auto& module : net->modules()) EXPECT_FALSE(module->is_training());
      assert_in_sync(net);
    });
  }
}

}  // namespace join_test
}  // namespace lockstep::nn
