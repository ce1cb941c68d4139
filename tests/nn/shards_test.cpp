#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <lockstep/dist.hpp>
#include <lockstep/nn.hpp>
#include <lockstep/objects.hpp>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/hash.hpp"
#include "helpers.hpp"
#include "support/expect.hpp"
#include "support/ranks.hpp"
#include "support/waiting.hpp"

namespace lockstep::nn::testing {
namespace {

using lockstep::test::expect_contains;
using lockstep::test::Form;
using lockstep::test::Setting;

constexpr int kShards = 8;

/// Collective: ranks that are threads share the generator, and DistributedDataParallel's copies
/// draw from it.
torch::nn::Sequential make_net(std::uint64_t seed) {
  static std::mutex mutex;
  std::unique_lock lock(mutex);
  torch::manual_seed(seed);
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)),
                            torch::nn::BatchNorm2d(8), torch::nn::ReLU(),
                            torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 12, 3).stride(2)),
                            torch::nn::BatchNorm2d(12), torch::nn::ReLU(), torch::nn::Flatten(),
                            torch::nn::Linear(12 * 7 * 7, 10));
  convert_sync_batchnorm(net);
  lock.unlock();
  barrier();
  return net;
}

std::uint64_t hash_of(const torch::nn::Module& module) {
  std::string bytes;
  const auto add = [&bytes](const at::Tensor& tensor) {
    const at::Tensor whole = tensor.detach().contiguous();
    bytes.append(static_cast<const char*>(whole.data_ptr()), whole.nbytes());
  };
  for (const at::Tensor& tensor : module.parameters()) add(tensor);
  for (const at::Tensor& tensor : module.buffers()) add(tensor);
  return base::hash_of_bytes(bytes.data(), bytes.size());
}

struct Options {
  at::ScalarType type = at::kFloat;
  int n_steps = 12;
  std::size_t global_batch = 29;
  int n_micro = 1;
};

/// The samples of a data set of 90.
std::pair<at::Tensor, at::Tensor> samples(const std::vector<std::size_t>& indices,
                                          at::ScalarType type) {
  static const at::Tensor images = Random(5).normal({90, 3, 16, 16});
  static const at::Tensor labels = Random(6).classes(10, 90);
  std::vector<std::int64_t> rows(indices.begin(), indices.end());
  const at::Tensor index = torch::tensor(rows, torch::kLong);
  return {images.index_select(0, index).to(type), labels.index_select(0, index)};
}

/// The hash of all numbers of a training, with the losses.
std::uint64_t train(const Options& options) {
  auto net = make_net(/*seed=*/1);
  net->to(options.type);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  DistributedDataParallel ddp(net, {.shards = kShards});
  const ElasticSampler sampler(90, {.global_batch = options.global_batch,
                                    .micro_batches = static_cast<std::size_t>(options.n_micro),
                                    .shards = kShards});
  const auto loss = [](torch::nn::Sequential& mine, const auto& part) {
    return torch::nn::functional::cross_entropy(
        mine->forward(part.first), part.second,
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  };
  std::vector<double> losses;
  for (int step = 0; step < options.n_steps; ++step) {
    sgd.zero_grad();
    for (int m = 0; m < options.n_micro; ++m) {
      const auto batch = samples(sampler.batch(step, static_cast<std::size_t>(m)), options.type);
      const auto run = [&] { losses.push_back(ddp.run_shards(batch, loss)); };
      if (m + 1 == options.n_micro) {
        run();
      } else {
        const auto accumulating = ddp.no_sync();
        run();
      }
    }
    sgd.step();
  }
  net->eval();
  const at::Tensor evaluated = ddp.forward(samples({1, 2, 3}, options.type).first);
  EXPECT_EQ(evaluated.size(0), 3);
  std::uint64_t hash = hash_of(*net);
  return hash ^ base::hash_of_bytes(losses.data(), losses.size() * sizeof(double));
}

std::uint64_t train_on(const Setting& setting, const Options& options) {
  const test::SharedCount result;
  run_as(setting, [&] {
    const at::AutoGradMode with_gradients(true);
    torch::set_num_threads(1);
    const std::uint64_t hash = train(options);
    for (const std::uint64_t other : all_gather_object(hash)) EXPECT_EQ(other, hash);
    if (get_rank() == 0) result.store(static_cast<int>(hash & 0x7fffffff));
  });
  return static_cast<std::uint64_t>(result.value());
}

class ShardsTrainingTest : public ::testing::TestWithParam<Options> {};

TEST_P(ShardsTrainingTest, give_the_same_bits_on_any_number_of_ranks) {
  const std::uint64_t alone = train_on({Form::solo, 1}, GetParam());
  for (const int n : {1, 2, 3, 5, 8}) {
    EXPECT_EQ(train_on({Form::threads, n}, GetParam()), alone) << n << " threads";
    EXPECT_EQ(train_on({Form::processes, n}, GetParam()), alone) << n << " processes";
  }
  // Where a host's shards are a node of the tree (2 and 4 of two each) and where they are none.
  for (const int n : {2, 3, 4, 5}) {
    EXPECT_EQ(train_on({Form::hosts, n}, GetParam()), alone) << n << " on hosts";
    EXPECT_EQ(train_on({Form::messages, n}, GetParam()), alone) << n << " over messages";
  }
}
constexpr const char* kTrainings[] = {"f32", "f64", "empty_shards", "micro_batches"};
INSTANTIATE_TEST_SUITE_P(Trainings, ShardsTrainingTest,
                         ::testing::Values(Options{}, Options{.type = at::kDouble},
                                           Options{.global_batch = 5}, Options{.n_micro = 2}),
                         [](const auto& training) { return kTrainings[training.index]; });

/// What f throws as each of two ranks, which have four shards.
void expect_refused(const std::string& part, const std::function<void(torch::nn::Sequential&)>& f) {
  on_ranks(2, [&](int) {
    torch::set_num_threads(1);
    auto net = make_net(/*seed=*/1);
    expect_contains(usage_error([&] { f(net); }), part);
  });
}

at::Tensor sum_of(torch::nn::Sequential& net, const at::Tensor& images) {
  return net->forward(images).sum();
}

at::Tensor two_of_each() { return Random(3).normal({4, 3, 16, 16}, at::kFloat); }

TEST(ShardsRefusalTest, what_would_depend_on_the_number_of_ranks_is_named) {
  expect_refused("1 shards for 2 ranks",
                 [](auto& net) { DistributedDataParallel ddp(net, {.shards = 1}); });
  expect_refused("communication hook", [](auto& net) {
    DistributedDataParallel ddp(net, {.comm_hook = f16_compression(), .shards = 4});
  });
  expect_refused("train with run_shards", [](auto& net) {
    DistributedDataParallel ddp(net, {.shards = 4});
    ddp.forward(two_of_each());
  });
  expect_refused("join is for ranks", [](auto& net) {
    DistributedDataParallel ddp(net, {.shards = 4});
    ddp.join([] {});
  });
  expect_refused("has 3 samples of a step of 6 in 4 shards; expected 4", [](auto& net) {
    DistributedDataParallel ddp(net, {.shards = 4});
    ddp.run_shards(two_of_each().narrow(0, 0, 3), sum_of);
  });
  expect_refused("needs shards", [](auto& net) {
    DistributedDataParallel ddp(net);
    ddp.run_shards(two_of_each(), sum_of);
  });
  expect_refused("has drawn random numbers", [](auto& net) {
    DistributedDataParallel ddp(net, {.shards = 4});
    ddp.run_shards(two_of_each(), [](auto& mine, const at::Tensor& images) {
      return at::dropout(mine->forward(images), 0.5, /*train=*/true).sum();
    });
  });
  expect_refused("'1' has been given a group", [](auto& net) {
    convert_sync_batchnorm(net.ptr(), default_group());
    DistributedDataParallel ddp(net, {.shards = 4});
    ddp.run_shards(two_of_each(), sum_of);
  });
  expect_refused("the sum of the losses", [](auto& net) {
    DistributedDataParallel ddp(net, {.shards = 4});
    ddp.run_shards(two_of_each(),
                   [](auto& mine, const at::Tensor& images) { return mine->forward(images); });
  });
}

TEST(ShardsRefusalTest, steps_that_are_no_step_of_all_shards_are_named) {
  using Net = torch::nn::Sequential;
  const auto with_shards = [](const std::function<void(Net&, DistributedDataParallel<Net>&)>& f) {
    return [f](Net& net) {
      DistributedDataParallel ddp(net, {.shards = 4});
      ddp.run_shards(two_of_each(), sum_of);
      f(net, ddp);
    };
  };
  expect_refused("have been added or removed", with_shards([](Net& net, auto& ddp) {
                   net->push_back(torch::nn::ReLU());
                   ddp.run_shards(two_of_each(), sum_of);
                 }));
  expect_refused("this rank has 2 intra-op threads, and shard_threads is 1",
                 with_shards([](Net&, auto& ddp) {
                   torch::set_num_threads(2);
                   ddp.run_shards(two_of_each(), sum_of);
                 }));
  expect_refused("no backward outside it",
                 with_shards([](Net& net, auto&) { sum_of(net, two_of_each()).backward(); }));
  expect_refused("the samples in their first dimension", with_shards([](Net&, auto& ddp) {
                   const std::pair batch(two_of_each(), torch::zeros({3}));
                   ddp.run_shards(
                       batch, [](Net& mine, const auto& part) { return sum_of(mine, part.first); });
                 }));
  expect_refused("buffer '1.running_mean' differs between the shards",
                 with_shards([](Net&, auto& ddp) {
                   ddp.run_shards(two_of_each(), [](Net& mine, const at::Tensor& images) {
                     const at::Tensor sum = sum_of(mine, images);
                     mine->named_buffers()["1.running_mean"].fill_(get_rank());
                     return sum;
                   });
                 }));
}

TEST(ShardsRefusalTest, what_each_shard_would_do_to_shared_parameters_is_named) {
  expect_refused("changed parameter 0.weight", [](auto& net) {
    DistributedDataParallel ddp(net, {.shards = 2});
    ddp.run_shards(two_of_each().narrow(0, 0, 1), [](auto& mine, const at::Tensor& images) {
      {
        const at::NoGradGuard no_grad;
        mine->parameters()[0].add_(0);
      }
      return sum_of(mine, images);
    });
  });
  expect_refused("called in the function of run_shards", [](auto& net) {
    DistributedDataParallel ddp(net, {.shards = 4});
    ddp.run_shards(two_of_each(), [&](auto& mine, const at::Tensor& images) {
      ddp.run_shards(images, sum_of);
      return sum_of(mine, images);
    });
  });
  expect_refused("-1 shards", [](auto&) { ElasticSampler(8, {.global_batch = 4, .shards = -1}); });
}

/// The others get it as a refused call, at once.
TEST(ShardsRefusalTest, a_rank_that_refuses_alone_is_named_to_the_others) {
  on_ranks(2, [](int rank) {
    torch::set_num_threads(1);
    auto net = make_net(/*seed=*/1);
    expect_contains(test::thrown<MismatchError>([&] {
                      const bool is_wrong = rank == 1;
                      try {
                        DistributedDataParallel ddp(net, {.shards = is_wrong ? 513 : 4});
                      } catch (const UsageError&) {
                        EXPECT_TRUE(is_wrong);
                        barrier();  // the others' next call
                      }
                    }),
                    rank == 1 ? "" : "513 shards for 2 ranks");
  });
  on_ranks(2, [](int rank) {
    torch::set_num_threads(1);
    auto net = make_net(/*seed=*/1);
    DistributedDataParallel ddp(net, {.shards = 4});
    if (rank == 1) net->push_back(torch::nn::ReLU());
    const auto run = [&] { ddp.run_shards(two_of_each(), sum_of); };
    if (rank == 1) {
      expect_contains(usage_error(run), "have been added or removed");
    } else {
      expect_contains(test::thrown<MismatchError>(run), "have been added or removed");
    }
  });
}

TEST(ShardsRefusalTest, ranks_that_would_compute_other_bits_are_named) {
  const auto expect_named = [](const std::string& part, int threads, int shards) {
    test::run_as({Form::processes, 2}, [&] {
      const int n_threads = get_rank() == 0 ? 1 : threads;
      torch::set_num_threads(n_threads);
      auto net = make_net(/*seed=*/1);
      const DistributedDataParallelOptions options{.shards = get_rank() == 0 ? 4 : shards,
                                                   .shard_threads = n_threads};
      expect_contains(
          test::thrown<MismatchError>([&] { DistributedDataParallel ddp(net, options); }), part);
    });
  };
  expect_named("rank 0 has 1 intra-op threads, rank 1 has 2 intra-op threads", 2, 4);
  expect_named("rank 0 has 4 shards, rank 1 has 5 shards", 1, 5);
}

/// Also where the others wait for its gradients, not for its statistics.
TEST(ShardsRefusalTest, a_shard_that_throws_ends_the_backward_of_the_others) {
  on_ranks(2, [](int rank) {
    torch::set_num_threads(1);
    torch::nn::Sequential net(torch::nn::Linear(5, 2));
    DistributedDataParallel ddp(net, {.shards = 5});  // 2 of rank 0, 3 of rank 1
    const auto batch = Random(3).normal({4 + rank * 2, 5}, at::kFloat);
    const auto run = [&] {
      ddp.run_shards(batch, [](auto& mine, const at::Tensor& images) {
        if (get_rank() == 3) throw std::runtime_error("no such image");
        return sum_of(mine, images);
      });
    };
    if (rank == 1) {
      EXPECT_EQ(test::thrown<std::runtime_error>(run), "no such image");
    } else {
      expect_contains(test::thrown<PeerFailed>(run), "rank 3 failed: no such image");
    }
    barrier();  // the ranks' own group goes on
  });
}

/// An Error too, if it is none of the shards' groups: one that only this shard has.
class ShardsErrorTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Where, ShardsErrorTest, ::testing::Bool(), [](const auto& is_in_backward) {
  return is_in_backward.param ? "backward" : "forward";
});

TEST_P(ShardsErrorTest, of_something_else_ends_the_step_of_the_others) {
  const std::vector<std::exception_ptr> errors = {
      std::make_exception_ptr(SystemError({}, ENOENT, "no such file")),
      std::make_exception_ptr(TimeoutError({.group = "of readers"}, "no such file")),
      std::make_exception_ptr(PeerFailed({.group = "of readers"}, "no such file"))};
  for (const std::exception_ptr& error : errors) {
    on_ranks(2, [&error](int rank) {
      torch::set_num_threads(1);
      torch::nn::Sequential net(torch::nn::Linear(5, 2));
      DistributedDataParallel ddp(net, {.shards = 4});
      const auto run = [&] {
        ddp.run_shards(Random(3).normal({4, 5}, at::kFloat),
                       [&error](auto& mine, const at::Tensor& images) {
                         const bool throws = get_rank() == 3;
                         if (throws && !GetParam()) std::rethrow_exception(error);
                         const at::Tensor sum = sum_of(mine, images);
                         if (throws) {
                           sum.register_hook([&error](const at::Tensor& gradient) {
                             std::rethrow_exception(error);
                             return gradient;
                           });
                         }
                         return sum;
                       });
      };
      try {
        run();
        ADD_FAILURE() << "a step without a shard";
      } catch (const Error& thrown) {
        expect_contains(thrown.what(), rank == 1 ? "no such file" : "rank 3 failed");
        expect_contains(thrown.what(), "no such file");
      }
    });
  }
}

/// An error that all shards throw leaves their groups alive.
TEST(ShardsRefusalTest, a_missing_gradient_is_an_error_of_all) {
  on_ranks(2, [](int) {
    torch::set_num_threads(1);
    torch::nn::Sequential net(torch::nn::Linear(5, 2), torch::nn::Linear(2, 2));
    DistributedDataParallel ddp(net, {.shards = 4});
    const at::Tensor batch = Random(3).normal({4, 5}, at::kFloat);
    const auto run = [&](bool all) {
      net->zero_grad();
      ddp.run_shards(batch, [all](auto& mine, const at::Tensor& images) {
        const at::Tensor first = mine[0]->template as<torch::nn::Linear>()->forward(images);
        if (!all && get_rank() == 1) return first.sum();
        return mine[1]->template as<torch::nn::Linear>()->forward(first).sum();
      });
    };
    run(true);
    expect_contains(test::thrown<MismatchError>([&] { run(false); }), "got a gradient on 3 of 4");
    run(true);
  });
}

TEST(ShardsRefusalTest, a_shard_that_throws_is_named_to_the_others) {
  on_ranks(2, [](int rank) {
    torch::set_num_threads(1);
    auto net = make_net(/*seed=*/1);
    std::optional<DistributedDataParallel<torch::nn::Sequential>> ddp(
        std::in_place, net, DistributedDataParallelOptions{.shards = 4});
    const auto f = [](auto& mine, const at::Tensor& images) {
      if (get_rank() == 3) throw std::runtime_error("no such image");
      return sum_of(mine, images);
    };
    if (rank == 1) {
      EXPECT_EQ(test::thrown<std::runtime_error>([&] { ddp->run_shards(two_of_each(), f); }),
                "no such image");
    } else {
      expect_contains(test::thrown<PeerFailed>([&] { ddp->run_shards(two_of_each(), f); }),
                      "rank 3 failed: no such image");
    }
    ddp.reset();  // a new one has a group of its own
    DistributedDataParallel again(net, {.shards = 4});
    EXPECT_GT(std::abs(again.run_shards(two_of_each(), sum_of)), 0);
  });
}

/// Gradients that the program changes are those of all shards.
TEST(ShardsTest, gradients_follow_the_module) {
  const auto clipped = [](int n) {
    std::uint64_t hash = 0;
    on_ranks(n, [&](int rank) {
      torch::set_num_threads(1);
      auto net = make_net(/*seed=*/1);
      DistributedDataParallel ddp(net, {.shards = 4});
      const at::Tensor all = Random(3).normal({8, 3, 16, 16}, at::kFloat);
      const at::Tensor mine = all.narrow(0, rank * 8 / n, 8 / n);
      ddp.run_shards(mine, sum_of);
      torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1);
      ddp.run_shards(mine, sum_of);  // adds to the clipped ones
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : net->parameters()) parameter.copy_(parameter.grad());
      if (rank == 0) hash = hash_of(*net);
    });
    return hash;
  };
  EXPECT_EQ(clipped(1), clipped(4));
  EXPECT_EQ(clipped(2), clipped(4));
}

TEST(ShardsTest, gradients_that_accumulate_may_only_be_cleared) {
  on_ranks(2, [](int) {
    torch::set_num_threads(1);
    auto net = make_net(/*seed=*/1);
    DistributedDataParallel ddp(net, {.shards = 4});
    const auto accumulating = ddp.no_sync();
    ddp.run_shards(two_of_each(), sum_of);
    const at::Tensor once = net->parameters()[0].grad().clone();
    for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad().zero_();
    ddp.run_shards(two_of_each(), sum_of);
    EXPECT_TRUE(net->parameters()[0].grad().equal(once));
    const auto version = net->parameters()[0].grad()._version();
    net->parameters()[0].mutable_grad().mul_(0.5);
    expect_contains(usage_error([&] { ddp.run_shards(two_of_each(), sum_of); }),
                    "the gradient of 0.weight has been changed");
    at::Tensor other = once * 3;
    while (other._version() < version) other.add_(0);
    net->parameters()[0].mutable_grad() = other;
    expect_contains(usage_error([&] { ddp.run_shards(two_of_each(), sum_of); }),
                    "the gradient of 0.weight has been changed");
  });
}

/// Clipping goes through data(), which has versions of its own.
TEST(ShardsTest, gradients_that_accumulate_may_not_be_clipped) {
  for (const int n : {1, 4}) {
    on_ranks(n, [n](int) {
      torch::set_num_threads(1);
      auto net = make_net(/*seed=*/1);
      DistributedDataParallel ddp(net, {.shards = 4});
      const auto accumulating = ddp.no_sync();
      const auto run = [&] { ddp.run_shards(two_of_each().narrow(0, 0, 4 / n), sum_of); };
      run();
      torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-3);
      expect_contains(usage_error(run), "has been changed");
    });
  }
}

/// A step that is refused when it is over has accumulated, too.
TEST(ShardsTest, gradients_accumulate_through_a_refused_step) {
  const auto accumulated = [](int n) {
    std::uint64_t hash = 0;
    on_ranks(n, [&](int rank) {
      torch::set_num_threads(1);
      auto net = make_net(/*seed=*/1);
      DistributedDataParallel ddp(net, {.shards = 4});
      const at::Tensor all = Random(3).normal({8, 3, 16, 16}, at::kFloat);
      const at::Tensor mine = all.narrow(0, rank * 8 / n, 8 / n);
      {
        const auto accumulating = ddp.no_sync();
        ddp.run_shards(mine, sum_of);
        expect_contains(usage_error([&] {
                          ddp.run_shards(mine, [](auto& copy, const at::Tensor& images) {
                            at::rand({1});
                            return sum_of(copy, images);
                          });
                        }),
                        "has drawn random numbers");
      }
      ddp.run_shards(mine, sum_of);
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : net->parameters()) parameter.copy_(parameter.grad());
      if (rank == 0) hash = hash_of(*net);
    });
    return hash;
  };
  EXPECT_EQ(accumulated(1), accumulated(4));
  EXPECT_EQ(accumulated(2), accumulated(4));
}

/// A layer that some shards use, in a step that accumulates; and rows of an embedding.
TEST(ShardsTest, gradients_that_some_shards_have) {
  const auto trained = [](int n, bool is_sparse) {
    std::uint64_t hash = 0;
    on_ranks(n, [&](int rank) {
      torch::set_num_threads(1);
      auto other = make_net(/*seed=*/1);  // for its lock and barrier
      torch::nn::Sequential net;
      if (is_sparse) {
        net->push_back(torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 3).sparse(true)));
      } else {
        net->push_back(torch::nn::Linear(5, 3));
        net->push_back(torch::nn::Linear(3, 3));
      }
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& parameter : net->parameters()) parameter.fill_(0.3);
      }
      DistributedDataParallel ddp(net, {.find_unused_parameters = true, .shards = 4});
      const auto all =
          is_sparse ? Random(3).classes(7, 8).view({8, 1}) : Random(3).normal({8, 5}, at::kFloat);
      const auto run = [&] {
        ddp.run_shards(all.narrow(0, rank * 8 / n, 8 / n), [](auto& mine, const at::Tensor& part) {
          if (mine->size() == 1) return mine->forward(part).square().sum();
          const at::Tensor first = mine[0]->template as<torch::nn::Linear>()->forward(part);
          if (get_rank() % 2 == 0) return first.sum();
          return mine[1]->template as<torch::nn::Linear>()->forward(first).sum();
        });
      };
      if (!is_sparse) {
        const auto accumulating = ddp.no_sync();
        run();
      }
      run();
      run();
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : net->parameters()) parameter.copy_(parameter.grad().to_dense());
      if (rank == 0) hash = hash_of(*net);
    });
    return hash;
  };
  for (const bool is_sparse : {false, true}) {
    EXPECT_EQ(trained(1, is_sparse), trained(4, is_sparse)) << is_sparse;
    EXPECT_EQ(trained(2, is_sparse), trained(4, is_sparse)) << is_sparse;
  }
}

/// Layers that conversion cannot reach have the statistics of all shards too.
TEST(ShardsTest, batch_normalisation_is_over_all_shards) {
  on_ranks(2, [](int rank) {
    torch::set_num_threads(1);
    torch::nn::Sequential net(torch::nn::BatchNorm2d(3));
    DistributedDataParallel ddp(net, {.shards = 4});
    const at::Tensor all = Random(3).normal({8, 3, 16, 16}, at::kFloat) + 2;
    ddp.run_shards(all.narrow(0, 4 * rank, 4), sum_of);
    torch::nn::BatchNorm2d one(3);
    one->forward(all);
    EXPECT_LT(difference(net->buffers()[0], one->running_mean), 1e-6);
    EXPECT_LT(difference(net->buffers()[1], one->running_var), 1e-6);
  });
}

/// The samples of each step by shard, on n ranks.
std::vector<std::vector<std::size_t>> drawn_by(int n, int n_resumed) {
  std::vector<std::vector<std::size_t>> steps;
  std::string saved;
  const auto draw = [&](int n_ranks, std::size_t n_steps, bool resumes) {
    on_ranks(n_ranks, [&](int rank) {
      DistributedSampler sampler(96, {.seed = 3, .shards = 6});
      if (resumes) {
        torch::serialize::InputArchive archive;
        std::istringstream in(saved);
        archive.load_from(in);
        sampler.load(archive);
      }
      sampler.reset();
      for (std::size_t step = 0; step < n_steps; ++step) {
        const auto mine = sampler.next(2);
        const auto all = all_gather_object(mine.value());
        if (rank != 0) continue;
        steps.emplace_back();
        for (const auto& part : all)
          steps.back().insert(steps.back().end(), part.begin(), part.end());
      }
      if (rank == 0 && !resumes) {
        torch::serialize::OutputArchive archive;
        sampler.save(archive);
        std::ostringstream out;
        archive.save_to(out);
        saved = out.str();
      }
    });
  };
  draw(n, 3, false);
  draw(n_resumed, 5, true);
  return steps;
}

TEST(ShardsTest, samplers_go_on_with_another_number_of_ranks) {
  const auto expected = drawn_by(6, 6);
  EXPECT_EQ(expected.size(), 8U);
  EXPECT_EQ(drawn_by(1, 4), expected);
  EXPECT_EQ(drawn_by(4, 2), expected);
  on_ranks(1, [](int) {
    expect_contains(usage_error([] { DistributedSampler(97, {.shards = 6}); }),
                    "UnevenTail::pad or drop");
  });
}

}  // namespace
}  // namespace lockstep::nn::testing
