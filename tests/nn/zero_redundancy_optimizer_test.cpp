// ZeroRedundancyOptimizer: the plain optimizer's bits with a part of its state.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "helpers.hpp"
#include "support/expect.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::nn {
namespace zero_redundancy_optimizer_test {

using at::Tensor;
using test::thrown;
using testing::on_ranks;
using testing::Random;
using torch::optim::OptimizerParamGroup;
using Groups = std::vector<OptimizerParamGroup>;

/// A class with options, plain and sharded.
struct Kind {
  std::string name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(Groups)> plain;
  std::function<std::unique_ptr<ZeroRedundancyOptimizerBase>(Groups)> sharded;
  std::size_t n_tensors;  ///< of state for each parameter
};

template <class Plain>
using OptionsOf = typename ZeroRedundancyOptimizer<Plain>::Options;

template <class Plain>
Kind kind(const std::string& name, std::size_t n_tensors, const OptionsOf<Plain>& options) {
  return {name,
          [options](Groups groups) { return std::make_unique<Plain>(std::move(groups), options); },
          [options](Groups groups) {
            return std::make_unique<ZeroRedundancyOptimizer<Plain>>(std::move(groups), options);
          },
          n_tensors};
}

std::vector<Kind> kinds() {
  using namespace torch::optim;  // NOLINT: the optimizers by their names
  return {
      kind<SGD>("SGD", 0, SGDOptions(0.1)),
      kind<SGD>("SGDNesterov", 1, SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(0.01)),
      kind<SGD>("SGDDampening", 1, SGDOptions(0.05).momentum(0.8).dampening(0.3)),
      kind<Adam>("Adam", 2, AdamOptions(0.003).betas({0.8, 0.95}).weight_decay(0.02)),
      kind<Adam>("AdamAmsgrad", 3, AdamOptions(0.003).eps(1e-6).amsgrad(true)),
      kind<AdamW>("AdamW", 3, AdamWOptions(0.003).weight_decay(0.1).amsgrad(true)),
      kind<RMSprop>("RMSprop", 1, RMSpropOptions(0.004).alpha(0.9)),
      kind<RMSprop>("RMSpropCentered", 3,
                    RMSpropOptions(0.004).momentum(0.7).centered(true).weight_decay(0.03)),
      kind<Adagrad>(
          "Adagrad", 1,
          AdagradOptions(0.02).lr_decay(0.1).weight_decay(0.01).initial_accumulator_value(0.2)),
  };
}

class KindTest : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(classes, KindTest, ::testing::ValuesIn(kinds()),
                         [](const auto& test) { return test.param.name; });

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = a.detach().contiguous().view({-1}), y = b.detach().contiguous().view({-1});
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
         (x.numel() == 0 || x.view(at::kByte).equal(y.view(at::kByte)));
}

void expect_same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same_bits(a[i], b[i])) << i;
}

/// Of several types and layouts.
std::vector<Tensor> parameters(std::uint64_t seed = 1) {
  Random random(seed);
  std::vector<Tensor> all{
      random.normal({61, 37}, at::kFloat),
      random.normal({}, at::kFloat),
      testing::channels_last(random.normal({6, 5, 3, 3})),
      random.normal({0, 4}, at::kFloat),
      random.normal({129}, at::kBFloat16),
      testing::strided(random.normal({7, 3})),
      testing::channels_last(random.normal({5, 1, 1, 1}, at::kFloat)),
      random.normal({40, 50}).t(),
  };
  for (Tensor& one : all) one.requires_grad_();
  return all;
}

Groups in_two_groups(const std::vector<Tensor>& all,
                     const torch::optim::OptimizerOptions& options) {
  auto others = options.clone();
  others->set_lr(options.get_lr() * 3);
  const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
  Groups groups;
  groups.emplace_back(std::vector<Tensor>(all.begin(), middle));
  groups.emplace_back(std::vector<Tensor>(middle, all.end()), std::move(others));
  return groups;
}

Groups in_two_groups(const std::vector<Tensor>& all, const Kind& kind) {
  return in_two_groups(all, kind.plain({OptimizerParamGroup(std::vector<Tensor>())})->defaults());
}

/// The same on every rank. In step 1 one parameter has none.
void set_gradients(const std::vector<Tensor>& all, int step) {
  Random random(static_cast<std::uint64_t>(100 + step));
  for (std::size_t i = 0; i < all.size(); ++i) {
    Tensor gradient = random.normal(all[i].sizes(), all[i].scalar_type());
    if (i % 2 == 0) gradient = at::empty_like(all[i]).copy_(gradient);
    Tensor parameter = all[i];
    parameter.mutable_grad() = step == 1 && i == 4 ? Tensor() : gradient.detach();
  }
}

void make_steps(torch::optim::Optimizer& optimizer, const std::vector<Tensor>& all, int from,
                int to) {
  torch::optim::StepLR scheduler(optimizer, 2, 0.5);
  for (int step = from; step < to; ++step) {
    set_gradients(all, step);
    optimizer.step();
    scheduler.step();
  }
}

TEST_P(KindTest, equals_the_plain_optimizer_bit_for_bit) {
  const std::vector<Tensor> expected = parameters();
  const auto plain = GetParam().plain(in_two_groups(expected, GetParam()));
  make_steps(*plain, expected, 0, 5);
  ASSERT_FALSE(same_bits(expected[0], parameters()[0]));
  for (const int n_ranks : {1, 2, 3, 4}) {
    on_ranks(n_ranks, [&](int /*rank*/) {
      const std::vector<Tensor> mine = parameters();
      const auto sharded = GetParam().sharded(in_two_groups(mine, GetParam()));
      make_steps(*sharded, mine, 0, 5);
      expect_same_bits(mine, expected);
      EXPECT_TRUE(sharded->state().empty());
      EXPECT_TRUE(mine[2].is_contiguous(at::MemoryFormat::ChannelsLast));
    });
  }
}

TEST_P(KindTest, keeps_its_part_of_the_state) {
  for (const int n_ranks : {1, 2, 3, 4}) {
    std::vector<std::size_t> n_bytes(static_cast<std::size_t>(n_ranks));
    std::int64_t n_elements = 0;
    on_ranks(n_ranks, [&](int rank) {
      Random random(1);
      const std::vector<Tensor> mine{random.normal({300, 70}), random.normal({11}),
                                     random.normal({90, 100})};
      const auto sharded = GetParam().sharded({OptimizerParamGroup(mine)});
      set_gradients(mine, 0);
      sharded->step();
      n_bytes[static_cast<std::size_t>(rank)] = sharded->n_state_bytes();
      if (rank == 0) {
        for (const Tensor& one : mine) n_elements += one.numel();
      }
    });
    const auto all =
        static_cast<double>(n_elements) * 8 * static_cast<double>(GetParam().n_tensors);
    for (const std::size_t n : n_bytes) {
      EXPECT_NEAR(static_cast<double>(n), all / n_ranks, 0.02 * all / n_ranks);
    }
  }
}

/// A file of `from` ranks goes on with `to`; 0: the plain optimizer.
void expect_resumes(const Kind& kind, int from, int to, const std::vector<Tensor>& expected) {
  const test::TemporaryFolder folder;
  const std::string path = folder / "saved.pt";
  const auto run = [&](int n, const auto& body) {
    on_ranks(std::max(n, 1), [&](int /*rank*/) {
      const std::vector<Tensor> mine = parameters();
      const auto groups = in_two_groups(mine, kind);
      const auto optimizer = n == 0
                                 ? kind.plain(groups)
                                 : std::unique_ptr<torch::optim::Optimizer>(kind.sharded(groups));
      body(*optimizer, mine);
    });
  };
  run(from, [&](torch::optim::Optimizer& optimizer, const std::vector<Tensor>& mine) {
    make_steps(optimizer, mine, 0, 3);
    save_training(path, {optimizer});
    make_steps(optimizer, mine, 3, 5);
    expect_same_bits(mine, expected);
  });
  run(to, [&](torch::optim::Optimizer& optimizer, const std::vector<Tensor>& mine) {
    {  // the parameters after three steps; the optimizer's state is other than that
      const auto fresh = kind.plain(in_two_groups(mine, kind));
      make_steps(*fresh, mine, 0, 3);
    }
    set_gradients(mine, 7);
    load_training(path, {optimizer});
    make_steps(optimizer, mine, 3, 5);
    expect_same_bits(mine, expected);
  });
}

TEST_P(KindTest, a_file_is_for_any_number_of_ranks_and_the_plain_optimizer) {
  const std::vector<Tensor> expected = parameters();
  const auto plain = GetParam().plain(in_two_groups(expected, GetParam()));
  make_steps(*plain, expected, 0, 3);
  make_steps(*plain, expected, 3, 5);
  for (const auto& [from, to] : std::vector<std::pair<int, int>>{
           {0, 0}, {1, 1}, {2, 2}, {3, 2}, {2, 4}, {1, 3}, {0, 3}, {3, 0}, {1, 0}}) {
    SCOPED_TRACE(std::to_string(from) + " to " + std::to_string(to));
    expect_resumes(GetParam(), from, to, expected);
  }
}

torch::nn::Sequential make_net(std::uint64_t seed) {
  using namespace torch::nn;  // NOLINT: the net reads as it would in a program
  Sequential net(Conv2d(Conv2dOptions(3, 8, 3).bias(false)), BatchNorm2d(8), ReLU(),
                 Conv2d(Conv2dOptions(8, 9, 3)), ReLU(), Flatten(), Linear(144, 7));
  const at::NoGradGuard no_grad;
  Random random(seed);
  for (Tensor& p : net->parameters()) {
    p.copy_(random.normal(p.sizes()) * 0.1);
    if (p.dim() == 4) p.set_data(testing::channels_last(p.detach()));
  }
  return net;
}

std::vector<Tensor> values_of(const torch::nn::Sequential& net) {
  std::vector<Tensor> values;
  for (const Tensor& p : net->parameters()) values.push_back(p.detach().clone());
  return values;
}

using Adam = torch::optim::Adam;
using AdamOptions = torch::optim::AdamOptions;
using ShardedAdam = ZeroRedundancyOptimizer<Adam>;
using ShardedSGD = ZeroRedundancyOptimizer<torch::optim::SGD>;

torch::optim::SGDOptions with_momentum() { return torch::optim::SGDOptions(0.1).momentum(0.9); }

TEST(ZeroRedundancyOptimizerTest, equals_the_plain_optimizer_over_data_parallel) {
  for (const bool is_made_before : {false, true}) {
    on_ranks(3, [&](int rank) {
      const auto train = [&]<class Optimizer>(const Optimizer* /*class*/) {
        const auto net = make_net(1);
        std::unique_ptr<Optimizer> optimizer;
        const auto make = [&] {
          optimizer = std::make_unique<Optimizer>(net->parameters(), AdamOptions(0.01));
        };
        if (is_made_before) make();
        DistributedDataParallel model(net, {.bucket_cap_mb = 0.002, .first_bucket_cap_mb = 0.001});
        if (!is_made_before) make();
        Random random(static_cast<std::uint64_t>(rank));
        for (int step = 0; step < 5; ++step) {
          optimizer->zero_grad();
          model(random.normal({2, 3, 8, 8}, at::kFloat)).square().sum().backward();
          optimizer->step();
        }
        // The gradients are the buckets' memory still.
        const Tensor before = net->parameters()[0].grad();
        model(random.normal({2, 3, 8, 8}, at::kFloat)).square().sum().backward();
        EXPECT_TRUE(before.is_same(net->parameters()[0].grad()));
        return values_of(net);
      };
      const auto expected = train(static_cast<const Adam*>(nullptr));
      expect_same_bits(train(static_cast<const ShardedAdam*>(nullptr)), expected);
    });
  }
}

TEST(ZeroRedundancyOptimizerTest, more_than_one_slot_of_memory) {
  const auto make = [] {
    std::vector<Tensor> all{at::zeros({3'000'001}), at::zeros({700'000}, at::kDouble)};
    for (Tensor& one : all) one.requires_grad_();
    return all;
  };
  const auto steps = [](torch::optim::Optimizer& optimizer, const std::vector<Tensor>& all) {
    for (int step = 0; step < 2; ++step) {
      set_gradients(all, step);
      optimizer.step();
    }
  };
  const auto expected = make();
  torch::optim::SGD plain(expected, with_momentum());
  steps(plain, expected);
  for (const int n_ranks : {2, 3}) {
    on_ranks(n_ranks, [&](int /*rank*/) {
      const auto mine = make();
      ShardedSGD sharded(mine, with_momentum());
      steps(sharded, mine);
      expect_same_bits(mine, expected);
    });
  }
}

TEST(ZeroRedundancyOptimizerTest, more_ranks_than_elements) {
  on_ranks(4, [](int /*rank*/) {
    const auto expected = at::ones({2}).requires_grad_(), mine = at::ones({2}).requires_grad_();
    Adam plain({expected}, AdamOptions(0.1));
    ShardedAdam sharded(std::vector{mine}, 0.1);
    for (int step = 0; step < 3; ++step) {
      set_gradients({expected}, step);
      plain.step();
      set_gradients({mine}, step);
      sharded.step();
    }
    expect_same_bits({mine}, {expected});
  });
}

TEST(ZeroRedundancyOptimizerTest, a_closure_runs_with_gradients_and_gives_the_loss) {
  on_ranks(2, [](int /*rank*/) {
    const Tensor mine = at::full({5}, 2.0).requires_grad_();
    ShardedSGD sharded(std::vector{mine}, 0.25);
    const at::NoGradGuard no_grad;
    const Tensor loss = sharded.step([&] {
      sharded.zero_grad();
      Tensor sum = mine.square().sum();
      sum.backward();
      return sum;
    });
    EXPECT_EQ(loss.item<double>(), 20);
    EXPECT_TRUE(mine.eq(1).all().item<bool>());  // 2 - 0.25 * 4
  });
}

TEST(ZeroRedundancyOptimizerTest, a_graph_that_saved_a_parameter_is_out_of_date) {
  for (const int n_ranks : {1, 2}) {
    on_ranks(n_ranks, [](int /*rank*/) {
      const Tensor mine = at::ones({5}).requires_grad_();
      ShardedSGD sharded(std::vector{mine}, 0.25);
      const Tensor loss = mine.square().sum();
      loss.backward({}, /*retain_graph=*/true);
      sharded.step();
      EXPECT_THROW(loss.backward(), c10::Error);
    });
  }
}

TEST(ZeroRedundancyOptimizerTest, a_group_added_later) {
  const auto train = [](torch::optim::Optimizer& optimizer, const std::vector<Tensor>& all) {
    for (int step = 0; step < 5; ++step) {
      if (step == 2) {
        optimizer.add_param_group(OptimizerParamGroup(
            std::vector<Tensor>(all.begin() + 3, all.end()),
            std::make_unique<AdamOptions>(AdamOptions(0.07).weight_decay(0.1))));
      }
      set_gradients(all, step);
      optimizer.step();
    }
  };
  const auto first_of = [](const std::vector<Tensor>& all) {
    return std::vector<Tensor>(all.begin(), all.begin() + 3);
  };
  const auto expected = parameters();
  Adam plain(first_of(expected), AdamOptions(0.01));
  train(plain, expected);
  for (const int n_ranks : {1, 3}) {
    on_ranks(n_ranks, [&](int /*rank*/) {
      const auto mine = parameters();
      ShardedAdam sharded(first_of(mine), 0.01);
      train(sharded, mine);
      expect_same_bits(mine, expected);
    });
  }
}

TEST(ZeroRedundancyOptimizerTest, save_needs_consolidate) {
  on_ranks(2, [](int rank) {
    const auto mine = parameters();
    ShardedAdam sharded(mine, 0.01);
    set_gradients(mine, 0);
    sharded.step();
    torch::serialize::OutputArchive archive;
    test::expect_contains(testing::usage_error([&] { sharded.save(archive); }),
                          {"only its part of the state", "consolidate"});
    sharded.consolidate(1);
    if (rank == 1) {
      EXPECT_NO_THROW(sharded.save(archive));
    }
    if (rank == 0) {
      EXPECT_THROW(sharded.save(archive), UsageError);
    }
    sharded.step();
    EXPECT_THROW(sharded.save(archive), UsageError);
    test::expect_contains(testing::usage_error([&] { sharded.consolidate(2); }),
                          {"to is 2; the group's ranks are 0 to 1"});
    EXPECT_NO_THROW(sharded.step());
  });
}

TEST(ZeroRedundancyOptimizerTest, a_file_that_does_not_load_changes_nothing) {
  const test::TemporaryFolder folder;
  const std::string path = folder / "saved.pt";
  on_ranks(1, [&](int /*rank*/) {
    const auto all = parameters();
    Adam adam(all, AdamOptions(0.5));
    double number = 1e300;
    save_training(path, {adam, number});
  });
  on_ranks(2, [&](int /*rank*/) {
    const auto expected = parameters(), mine = parameters();
    Adam plain(expected, AdamOptions(0.01));
    ShardedAdam sharded(mine, 0.01), in_two(in_two_groups(parameters(), AdamOptions(0.01)), 0.01);
    set_gradients(expected, 0);
    plain.step();
    set_gradients(mine, 0);
    sharded.step();
    int number = 0;
    test::expect_contains(testing::usage_error([&] {
                            load_training(path, {sharded, number});
                          }),
                          {"cannot hold"});
    test::expect_contains(testing::usage_error([&] {
                            load_training(path, {in_two, number});
                          }),
                          {"different number of parameter groups"});
    ShardedSGD other(parameters(), 0.1);
    test::expect_contains(testing::usage_error([&] {
                            load_training(path, {other, number});
                          }),
                          {"optimizer of the same class"});
    set_gradients(expected, 1);
    plain.step();
    set_gradients(mine, 1);
    sharded.step();
    expect_same_bits(mine, expected);
  });
}

TEST(ZeroRedundancyOptimizerTest, assert_in_sync_names_the_options) {
  on_ranks(2, [](int rank) {
    const auto net = make_net(1);
    ShardedAdam sharded(net->parameters(), 0.01);
    for (const Tensor& p : net->parameters()) set_gradients({p}, 0);
    sharded.step();
    assert_in_sync(net, sharded);
    if (rank == 1) sharded.param_groups()[0].options().set_lr(0.5);
    test::expect_contains(thrown<MismatchError>([&] { assert_in_sync(net, sharded); }),
                          {"the options of the optimizer's parameter group 0"});
  });
}

TEST(ZeroRedundancyOptimizerTest, different_parameters_are_named_on_every_rank) {
  on_ranks(3, [](int rank) {
    const auto net = make_net(rank == 2 ? 2 : 1);
    test::expect_contains(thrown<MismatchError>([&] { ShardedAdam(net->parameters(), 0.01); }),
                          {"parameter 0 of the optimizer's parameter group 0, Float [8, 3, 3, 3]",
                           "rank 2 and rank 0 differ", "DistributedDataParallel"});
    test::expect_contains(
        thrown<MismatchError>(
            [&] { ShardedAdam(std::vector{at::ones({rank == 1 ? 3 : 2})}, 0.01); }),
        {"rank 0 has parameter 0", "Float [2]", "rank 1 has parameter 0", "Float [3]"});
    const auto same = make_net(1);
    test::expect_contains(
        thrown<MismatchError>([&] { ShardedAdam(same->parameters(), rank == 1 ? 0.1 : 0.01); }),
        {"option lr of the optimizer's parameter group 0", "rank 1 and rank 0"});
    test::expect_contains(thrown<MismatchError>([&] {
                            const auto all = parameters();
                            ShardedAdam(rank == 1 ? in_two_groups(all, AdamOptions(0.01))
                                                  : Groups{OptimizerParamGroup(all)},
                                        0.01);
                          }),
                          {"parameter group 1"});
  });
}

TEST(ZeroRedundancyOptimizerTest, a_step_that_differs_is_named_on_every_rank) {
  on_ranks(2, [](int rank) {
    const auto mine = parameters(), before = parameters();
    ShardedSGD sharded(mine, with_momentum());
    set_gradients(mine, 0);
    if (rank == 1) Tensor(mine[4]).mutable_grad().reset();
    test::expect_contains(thrown<MismatchError>([&] { sharded.step(); }),
                          {"the presence of a gradient of parameter 4", "rank 1 and rank 0"});
    set_gradients(mine, 0);
    if (rank == 1) sharded.param_groups()[0].options().set_lr(0.3);
    test::expect_contains(thrown<MismatchError>([&] { sharded.step(); }),
                          {"option lr of the optimizer's parameter group 0", "rank 1 and rank 0"});
    sharded.param_groups()[0].options().set_lr(0.3);
    expect_same_bits(mine, before);
    if (rank == 0) sharded.add_param_group(OptimizerParamGroup(std::vector{at::ones({3})}));
    test::expect_contains(thrown<MismatchError>([&] { sharded.step(); }), {"parameter group 1"});
    if (rank == 1) sharded.add_param_group(OptimizerParamGroup(std::vector{at::ones({3})}));
    EXPECT_NO_THROW(sharded.step());
    EXPECT_FALSE(same_bits(mine[0], before[0]));
  });
}

TEST(ZeroRedundancyOptimizerTest, sparse_gradients_are_refused) {
  on_ranks(2, [](int rank) {
    torch::nn::Embedding layer(torch::nn::EmbeddingOptions(4, 3).sparse(true));
    {
      const at::NoGradGuard no_grad;
      layer->weight.fill_(1);
    }
    ShardedSGD sharded(layer->parameters(), 0.1);
    layer(torch::tensor({1, 2})).sum().backward();
    test::expect_contains(testing::usage_error([&] { sharded.step(); }),
                          {"the gradient of parameter 0", "is sparse"});
    if (rank == 0) layer->weight.mutable_grad() = at::ones({4, 3});
    if (rank == 0) {
      EXPECT_THROW(sharded.step(), MismatchError);
    }
    if (rank == 1) {
      EXPECT_THROW(sharded.step(), UsageError);
    }
  });
}

TEST(ZeroRedundancyOptimizerTest, a_closure_that_throws_reaches_the_peers) {
  on_ranks(2, [](int rank) {
    const auto mine = parameters();
    ShardedSGD sharded(mine, 0.1);
    set_gradients(mine, 0);
    const auto closure = [&]() -> Tensor {
      if (rank == 1) throw std::runtime_error("no more batches");
      return at::ones({});
    };
    if (rank == 1) {
      EXPECT_THROW(sharded.step(closure), std::runtime_error);
    }
    if (rank == 0) {
      test::expect_contains(thrown<MismatchError>([&] { sharded.step(closure); }),
                            {"no more batches"});
    }
  });
}

TEST(ZeroRedundancyOptimizerTest, wrong_parameters_are_refused) {
  on_ranks(2, [](int /*rank*/) {
    const Tensor one = at::ones({3});
    test::expect_contains(testing::usage_error([&] {
                            ShardedAdam(std::vector{one, one}, 0.1);
                          }),
                          {"parameter 1", "listed twice"});
    test::expect_contains(
        testing::usage_error([&] { ShardedAdam(std::vector{at::ones({1}).expand({3})}, 0.1); }),
        {"share memory", "contiguous()"});
    test::expect_contains(
        testing::usage_error([&] { ShardedAdam(std::vector{at::eye(3).to_sparse()}, 0.1); }),
        {"make it a dense tensor"});
    EXPECT_THROW(ShardedAdam(std::vector{one}, -1), c10::Error);
    ShardedAdam sharded(std::vector{one}, 0.1);
    sharded.param_groups()[0].params()[0] = at::ones({3});
    test::expect_contains(testing::usage_error([&] { sharded.step(); }), {"have been exchanged"});
  });
}

TEST(ZeroRedundancyOptimizerTest, join_and_elastic_state_refuse_it) {
  on_ranks(2, [](int /*rank*/) {
    const auto net = make_net(1);
    DistributedDataParallel model(net);
    ShardedAdam sharded(net->parameters(), 0.1);
    test::expect_contains(
        testing::usage_error([&] { model.join([] {}, {.optimizers = {&sharded}}); }),
        {"join does not support ZeroRedundancyOptimizer"});
    test::expect_contains(testing::usage_error([&] { ElasticState({sharded}); }),
                          {"ElasticState does not support ZeroRedundancyOptimizer"});
  });
}

/// Its state would be in the order of other elements, or of another type.
TEST(ZeroRedundancyOptimizerTest, a_parameter_of_another_form_is_refused) {
  on_ranks(2, [](int /*rank*/) {
    const auto refused = [](const std::function<void(at::Tensor&)>& change) {
      at::Tensor parameter = Random(1).normal({2, 3, 4, 5}).requires_grad_();
      ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(
          std::vector{parameter}, torch::optim::SGDOptions(0.1).momentum(0.9));
      change(parameter);
      const at::Tensor before = parameter.detach().clone();
      const std::string text = testing::usage_error([&] { optimizer.step(); });
      test::expect_contains(text, "its type, shape or order in memory has changed");
      EXPECT_TRUE(parameter.detach().equal(before));
    };
    refused([](at::Tensor& p) { p.set_data(p.detach().to(at::kFloat)); });
    refused([](at::Tensor& p) { p.set_data(testing::channels_last(p.detach())); });
    refused([](at::Tensor& p) { p.set_data(at::ones({9}, at::kDouble)); });
    const at::Tensor whole = at::ones({6}, at::kDouble);
    const std::vector<at::Tensor> tied{whole.narrow(0, 0, 4).requires_grad_(),
                                       whole.narrow(0, 2, 4).requires_grad_()};
    const std::string text =
        testing::usage_error([&] { ZeroRedundancyOptimizer<torch::optim::SGD> o(tied, 0.1); });
    test::expect_contains(text, "shares memory with parameter 0");
    EXPECT_EQ(all_reduce_value(1), 2);
  });
}

TEST(ZeroRedundancyOptimizerTest, a_step_beside_a_consolidation_is_named) {
  on_ranks(2, [](int rank) {
    at::Tensor parameter = at::ones({8}).requires_grad_();
    ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(std::vector{parameter}, 0.1);
    parameter.mutable_grad() = at::ones({8});
    test::expect_contains(test::thrown<MismatchError>([&] {
                            if (rank == 0) {
                              optimizer.step();
                            } else {
                              optimizer.consolidate();
                            }
                          }),
                          "rank 0 has a step where rank 1 has a consolidation");
    EXPECT_TRUE(parameter.detach().eq(1).all().item<bool>());
  });
}

/// Again at the next step, too.
TEST(ZeroRedundancyOptimizerTest, parameters_that_are_tied_later_are_refused) {
  on_ranks(2, [](int /*rank*/) {
    at::Tensor a = at::ones({4}).requires_grad_(), b = at::ones({4}).requires_grad_();
    ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(std::vector{a, b}, 0.1);
    b.set_data(a.detach());
    a.mutable_grad() = at::ones({4});
    for (int step = 0; step < 2; ++step) {
      const std::string text = testing::usage_error([&] { optimizer.step(); });
      test::expect_contains(text, "parameter 1 of the optimizer's parameter group 0 shares memory");
    }
    b.set_data(at::ones({4}));
    EXPECT_NO_THROW(optimizer.step());
  });
}

}  // namespace zero_redundancy_optimizer_test
}  // namespace lockstep::nn
