#include <lockstep/nn/data_parallel.hpp>

#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "helpers.hpp"
#include "support/expect.hpp"
#include "training.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::difference;
using testing::Random;
using testing::usage_error;
using namespace torch::nn;  // NOLINT: the modules by their names

std::vector<at::Device> cpus(std::size_t n) { return std::vector<at::Device>(n, at::kCPU); }

/// A module with a type of its own, whose norm can be converted.
struct TailImpl : torch::nn::Cloneable<TailImpl> {
  explicit TailImpl(bool has_affine) : affine(has_affine) { TailImpl::reset(); }
  void reset() override {
    norm = register_module("norm",
                           Sequential(BatchNorm2d(BatchNormOptions(6).affine(affine)), Tanh()));
    linear = register_module("linear", Linear(96, 3));
  }
  Tensor forward(const Tensor& x) { return linear->forward(norm->forward(x).flatten(1)); }
  bool affine;
  Sequential norm{nullptr};
  Linear linear{nullptr};
};
TORCH_MODULE(Tail);

Sequential make_net(at::ScalarType type, bool affine = true) {
  Sequential net(Conv2d(Conv2dOptions(2, 4, 3).padding(1)),
                 BatchNorm2d(BatchNormOptions(4).affine(affine)), ReLU(),
                 Conv2d(Conv2dOptions(4, 6, 3).bias(false)), Tail(affine));
  net->to(type);
  const at::NoGradGuard no_grad;
  Random random(3);
  for (auto& parameter : net->parameters()) parameter.copy_(random.normal(parameter.sizes()) * 0.3);
  return net;
}

/// Largest difference of gradients, parameters and buffers.
double state_difference(const Sequential& a, const Sequential& b) {
  double worst = 0;
  const auto compare = [&worst](const std::vector<Tensor>& x, const std::vector<Tensor>& y) {
    ASSERT_EQ(x.size(), y.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      worst = std::max({worst, difference(x[i], y[i]), difference(x[i].grad(), y[i].grad())});
    }
  };
  compare(a->parameters(), b->parameters());
  compare(a->buffers(), b->buffers());
  return worst;
}

struct SplitCase {
  std::size_t n_devices;
  std::int64_t n_samples;
  at::ScalarType type;
  bool affine = true;
};

void expect_equal_training(const SplitCase& c) {
  SCOPED_TRACE(::testing::Message() << c.n_devices << " devices, " << c.n_samples << " samples, "
                                    << c10::toString(c.type) << ", affine " << c.affine);
  testing::Training training;
  training.make_net = [&](std::uint64_t /*seed*/) { return make_net(c.type, c.affine); };
  training.make_optimizer = testing::make_sgd(0.01);
  training.make_batch = [&](Random& random, std::int64_t n) {
    const Tensor x = random.normal({n, 2, 6, 6}, c.type);
    return testing::Batch{x, random.normal({n, 3}, c.type)};
  };
  training.loss = [](const Tensor& y, const Tensor& target) {
    return at::mse_loss(y, target) * y.size(0);
  };
  training.shares = [&](int /*epoch*/, int /*batch*/) { return testing::Shares{c.n_samples}; };
  training.n_epochs = 20;  // each compares outputs and gradients
  training.n_replicas = c.n_devices;
  testing::expect_like_one_rank(training, {test::Form::solo, 1},
                                c.type == at::kDouble ? 1e-12 : 1e-5);
}

void expect_equal_trainings(at::ScalarType type) {
  for (const std::size_t n_devices : {1, 2, 3, 4, 8}) {
    for (const std::int64_t n_samples : {1, 2, 7, 16, 33}) {
      expect_equal_training({n_devices, n_samples, type});
    }
  }
}

TEST(DataParallelTest, trains_as_the_plain_module_on_the_whole_batch) {
  expect_equal_trainings(at::kDouble);
  for (const std::int64_t n_samples : {2, 33}) expect_equal_training({3, n_samples, at::kFloat});
}
TEST(DataParallelTest, trains_in_f32_as_the_plain_module_on_the_whole_batch) {  // in nightly
  expect_equal_trainings(at::kFloat);
}

/// The cases of the published tests of vacancy/Synchronized-BatchNorm-PyTorch: train and eval,
/// plain and replicated, 1-d and 2-d, with and without affine; outputs, gradients and statistics.
void expect_batch_norm(EpsMode mode, bool affine, bool training, bool is_image,
                       std::size_t n_devices) {
  SCOPED_TRACE(::testing::Message() << (mode == EpsMode::clamp ? "clamp" : "plus") << ", affine "
                                    << affine << ", training " << training << ", image " << is_image
                                    << ", " << n_devices << " devices");
  constexpr double kEps = 1e-5;
  // Every variance here is above eps: clamp then leaves it as it is. Eval mode always adds eps.
  const double eps = mode == EpsMode::clamp && training ? 0 : kEps;
  const auto options = BatchNormOptions(10).affine(affine).eps(eps);
  const auto sync = SyncBatchNormOptions(10).affine(affine).eps(kEps).eps_mode(mode);
  Sequential plain, net;
  if (is_image) {
    plain->push_back(BatchNorm2d(options));
    net->push_back(SyncBatchNorm2d(sync));
  } else {
    plain->push_back(BatchNorm1d(options));
    net->push_back(SyncBatchNorm1d(sync));
  }
  for (Sequential module : {plain, net}) {
    module->to(at::kDouble);
    module->train(training);
    const at::NoGradGuard no_grad;
    Random random(6);
    for (auto& parameter : module->parameters()) parameter.copy_(random.normal({10}));
    for (auto& buffer : module->named_buffers()) {
      if (buffer.key() == "0.running_mean") buffer.value().fill_(0.3);
      if (buffer.key() == "0.running_var") buffer.value().fill_(2);
    }
  }
  DataParallelWithCallback model(net, cpus(n_devices));
  Random random(7);
  for (int turn = 0; turn < 3; ++turn) {
    const auto shape =
        is_image ? std::vector<std::int64_t>{16, 10, 4, 4} : std::vector<std::int64_t>{16, 10};
    const Tensor x = (random.normal(shape) * 3 + 1).requires_grad_();
    const Tensor x2 = x.detach().clone().requires_grad_();
    const Tensor dy = random.normal(shape);
    const Tensor y = model(x), y2 = plain->forward(x2);
    y.backward(dy);
    y2.backward(dy);
    EXPECT_LE(difference(y, y2), 1e-12);
    EXPECT_LE(difference(x.grad(), x2.grad()), 1e-12);
    EXPECT_LE(state_difference(net, plain), 1e-11);  // gradients are sums of 768 values
  }
}

TEST(DataParallelTest, batch_norm_with_plus_and_with_clamp) {
  for (const EpsMode mode : {EpsMode::plus, EpsMode::clamp}) {
    for (const bool affine : {true, false}) {
      for (const bool training : {true, false}) {
        for (const bool is_image : {true, false}) {
          for (const std::size_t n_devices : {1, 2, 4}) {
            expect_batch_norm(mode, affine, training, is_image, n_devices);
          }
        }
      }
    }
  }
}

TEST(DataParallelTest, trains_without_affine) { expect_equal_training({3, 7, at::kDouble, false}); }

template <class F>
struct LambdaImpl : torch::nn::Cloneable<LambdaImpl<F>> {
  explicit LambdaImpl(F f) : body(std::make_shared<F>(std::move(f))) {}
  void reset() override {}
  template <class... Args>
  auto forward(const Args&... args) {
    return (*body)(args...);
  }
  std::shared_ptr<F> body;
};
template <class F>
auto module_of(F f) {
  return std::make_shared<LambdaImpl<F>>(std::move(f));
}

TEST(DataParallelTest, scatter_and_gather_nested_tensors) {
  using Dict = std::map<std::string, std::vector<Tensor>>;
  DataParallel model(module_of([](const Dict& dict, double factor, const Tensor& number) {
                       torch::OrderedDict<std::string, Tensor> named;
                       named.insert("b", dict.at("b")[0] * number);
                       return std::tuple(
                           std::vector<Tensor>{dict.at("a")[1] * factor, dict.at("a")[0]}, named,
                           std::pair(dict.at("a")[0].sum(), std::map<int, Tensor>{{1, number}}));
                     }),
                     cpus(3));
  const Tensor x = at::arange(10, at::kDouble).view({5, 2});
  const auto [list, named, pair] =
      model(Dict{{"a", {x, x + 1}}, {"b", {x * 2}}}, 0.5, at::scalar_tensor(3.0, at::kDouble));
  EXPECT_TRUE(list[0].equal((x + 1) * 0.5));
  EXPECT_TRUE(list[1].equal(x));
  EXPECT_TRUE(named["b"].equal(x * 6));
  EXPECT_TRUE(pair.first.equal(at::tensor({6.0, 22.0, 17.0}))) << pair.first;
  EXPECT_TRUE(pair.second.at(1).equal(at::tensor({3.0, 3.0, 3.0})));
}

TEST(DataParallelTest, scatter_and_gather_arrays_and_unordered_maps) {
  using Dict = std::unordered_map<std::string, Tensor>;
  DataParallel model(module_of([](const std::array<Tensor, 2>& pair) {
                       // Replicas insert in other orders.
                       return pair[0].size(0) == 2 ? Dict{{"a", pair[0]}, {"b", pair[1]}}
                                                   : Dict{{"b", pair[1]}, {"a", pair[0]}};
                     }),
                     cpus(2));
  const Tensor x = at::arange(3);
  const Dict joined = model(std::array<Tensor, 2>{x, x + 3});
  EXPECT_TRUE(joined.at("a").equal(x));
  EXPECT_TRUE(joined.at("b").equal(x + 3));
}

TEST(DataParallelTest, chunks_along_any_dim) {
  for (const std::int64_t size : {0, 1, 2, 3, 5, 9, 33}) {
    std::mutex mutex;
    std::multiset<std::int64_t> sizes;
    DataParallel model(module_of([&](const Tensor& x) {
                         const std::lock_guard lock(mutex);
                         sizes.insert(x.size(1));
                         return x + 1;
                       }),
                       cpus(4), at::Device(at::kCPU), /*dim=*/1);
    const Tensor x = at::rand({2, size});
    EXPECT_TRUE(model(x).equal(x + 1));
    std::multiset<std::int64_t> expected{0};
    if (size > 0) {
      expected.clear();
      for (const Tensor& piece : x.chunk(4, 1)) expected.insert(piece.size(1));
    }
    EXPECT_EQ(sizes, expected);
  }
}

/// Records what a replica sees of its module and thread.
struct WitnessImpl : torch::nn::Cloneable<WitnessImpl> {
  struct Sight {
    std::string thread;
    bool grad, inference, training;
    const void* weight;
    const void* buffer;
    at::ScalarType type;
  };
  struct Log {
    std::mutex mutex;
    std::vector<Sight> sights;
  };
  explicit WitnessImpl(std::shared_ptr<Log> shared_log) : log(std::move(shared_log)) { reset(); }
  void reset() override {
    linear = register_module("linear", Linear(2, 2));
    buffer = register_buffer("buffer", at::zeros({1}));
  }
  Tensor forward(const Tensor& x) {
    std::string name(16, '\0');
    ::pthread_getname_np(::pthread_self(), name.data(), name.size());
    {
      const std::lock_guard lock(log->mutex);
      log->sights.push_back({name.c_str(), at::GradMode::is_enabled(),
                             c10::InferenceMode::is_enabled(), linear->is_training(),
                             linear->weight.data_ptr(), buffer.data_ptr(),
                             linear->weight.scalar_type()});
    }
    {
      const at::NoGradGuard no_grad;
      buffer.add_(x.size(0));
    }
    return linear->forward(x) * factor;
  }
  std::shared_ptr<Log> log;
  Linear linear{nullptr};
  Tensor buffer;
  double factor = 1;
};
TORCH_MODULE(Witness);

class WitnessTest : public ::testing::Test {
 protected:
  /// What the replicas of one forward saw, by thread.
  std::map<std::string, WitnessImpl::Sight> look(const Tensor& batch) {
    log->sights.clear();
    model(batch);
    std::map<std::string, WitnessImpl::Sight> by_thread;
    for (const auto& sight : log->sights) by_thread.emplace(sight.thread, sight);
    EXPECT_EQ(by_thread.size(), log->sights.size());
    return by_thread;
  }

  std::shared_ptr<WitnessImpl::Log> log = std::make_shared<WitnessImpl::Log>();
  Witness net{log};
  DataParallel<Witness> model{net, cpus(3)};
  const Tensor x = at::rand({7, 2});
};

TEST_F(WitnessTest, one_named_thread_per_replica_and_shared_parameters) {
  for (int step = 0; step < 3; ++step) {
    const auto sights = look(x);
    ASSERT_EQ(sights.size(), 3U);
    for (int i = 0; i < 3; ++i) {
      const auto& sight = sights.at("replica-" + std::to_string(i));
      EXPECT_EQ(sight.weight, net->linear->weight.data_ptr());
      EXPECT_EQ(sight.buffer == net->buffer.data_ptr(), i == 0);
    }
  }
  EXPECT_EQ(net->buffer.item<float>(), 9) << "copy 0's, three times three samples";
}

TEST_F(WitnessTest, grad_and_inference_mode_are_the_callers) {
  EXPECT_TRUE(look(x).at("replica-1").grad);
  EXPECT_TRUE(model(x).requires_grad());
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(look(x).at("replica-1").grad);
    EXPECT_FALSE(model(x).requires_grad());
  }
  const c10::InferenceMode inference;
  EXPECT_TRUE(look(x).at("replica-1").inference);
  EXPECT_TRUE(model(x).is_inference());
}

TEST_F(WitnessTest, first_forward_in_inference_mode_can_train_after) {
  {
    const c10::InferenceMode inference;
    model(x);
  }
  model(x).sum().backward();
  EXPECT_TRUE(net->linear->weight.grad().defined());
}

TEST_F(WitnessTest, sees_changes_of_the_module) {
  look(x);
  net->eval();
  EXPECT_FALSE(look(x).at("replica-2").training);
  net->train();
  EXPECT_TRUE(look(x).at("replica-2").training);
  net->to(at::kDouble);
  EXPECT_EQ(look(x.to(at::kDouble)).at("replica-2").type, at::kDouble);
  model(x.to(at::kDouble)).sum().backward();
  EXPECT_LE(difference(net->linear->bias.grad(), at::full({2}, 7.0)), 0);

  net->linear->weight.set_data(at::ones({2, 2}, at::kDouble));
  EXPECT_EQ(look(x.to(at::kDouble)).at("replica-1").weight, net->linear->weight.data_ptr());
  net->linear->bias.requires_grad_(false);
  net->zero_grad(/*set_to_none=*/false);
  model(x.to(at::kDouble)).sum().backward();
  EXPECT_LE(testing::largest(net->linear->bias.grad()), 0);
  net->linear->weight.requires_grad_(false);
  EXPECT_FALSE(model(x.to(at::kDouble)).requires_grad());
}

TEST_F(WitnessTest, members_are_seen_after_refresh) {
  const Tensor before = model(x);
  net->factor = 2;
  EXPECT_TRUE(model(x).equal(before));
  model.refresh();
  EXPECT_TRUE(model(x).equal(before * 2));
}

TEST_F(WitnessTest, copies_draw_no_random_numbers) {
  torch::manual_seed(1);
  const Tensor expected = at::rand({3});
  torch::manual_seed(1);
  model(x);
  EXPECT_TRUE(at::rand({3}).equal(expected));
}

TEST_F(WitnessTest, a_step_between_forward_and_backward_is_noticed) {
  const Tensor y = model(x.clone().requires_grad_());
  {
    const at::NoGradGuard no_grad;
    net->linear->weight.add_(1);
  }
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST(DataParallelTest, submodules_replaced_later_are_seen) {
  Sequential net(Linear(2, 2), BatchNorm1d(2));
  net->to(at::kDouble);
  DataParallel model(net, cpus(2));
  Random random(1);
  model(random.normal({4, 2}));
  convert_sync_batchnorm(net);
  Sequential plain(std::dynamic_pointer_cast<SequentialImpl>(net->clone()));
  revert_sync_batchnorm(plain);
  const Tensor x = random.normal({5, 2});
  EXPECT_LE(difference(model(x), plain->forward(x)), 1e-12);
}

TEST(DataParallelTest, statistics_of_plain_batch_norm_arrive) {
  Sequential net(BatchNorm1d(3));
  BatchNorm1d first(3);
  DataParallel model(net, cpus(4));
  Random random(2);
  for (int step = 0; step < 3; ++step) {
    const Tensor x = random.normal({12, 3}, at::kFloat);
    model(x);
    first->forward(x.narrow(0, 0, 3));  // as PyTorch: those of the first piece
    EXPECT_TRUE(net->named_buffers()["0.running_mean"].equal(first->running_mean));
    EXPECT_TRUE(net->named_buffers()["0.running_var"].equal(first->running_var));
    EXPECT_TRUE(net->named_buffers()["0.num_batches_tracked"].equal(first->num_batches_tracked));
  }
  net->eval();
  first->eval();
  const Tensor x = random.normal({12, 3}, at::kFloat);
  EXPECT_LE(difference(model(x), first->forward(x)), 1e-6);
}

TEST(DataParallelTest, named_sequentials_and_shared_modules) {
  const auto make = [] {
    BatchNorm1d shared(4);
    Sequential net(torch::OrderedDict<std::string, AnyModule>{{"first", AnyModule(Linear(2, 4))},
                                                              {"norm", AnyModule(shared)},
                                                              {"middle", AnyModule(Linear(4, 4))},
                                                              {"again", AnyModule(shared)}});
    net->to(at::kDouble);
    const at::NoGradGuard no_grad;
    Random random(4);
    for (auto& parameter : net->parameters()) parameter.copy_(random.normal(parameter.sizes()));
    return net;
  };
  Sequential plain = make(), net = make();
  convert_sync_batchnorm(net);
  DataParallelWithCallback model(net, cpus(3));
  const Tensor x = Random(5).normal({8, 2});
  const Tensor y = model(x), y2 = plain->forward(x);
  EXPECT_LE(difference(y, y2), 1e-12);
  (y * y * y).sum().backward();
  (y2 * y2 * y2).sum().backward();
  EXPECT_LE(state_difference(net, plain), 1e-9);
}

/// Throws in the piece that holds a sample of this value.
struct TripwireImpl : torch::nn::Cloneable<TripwireImpl> {
  void reset() override {}
  Tensor forward(const Tensor& x) {
    if ((x == kTrip).any().item<bool>()) throw std::out_of_range("tripped");
    return x;
  }
  static constexpr double kTrip = 1e6;
};
TORCH_MODULE(Tripwire);

TEST(DataParallelTest, an_exception_names_its_replica_and_frees_the_others) {
  Sequential net(Tripwire(), SyncBatchNorm1d(2));
  net->to(at::kDouble);
  DataParallelWithCallback model(net, cpus(4));
  for (std::int64_t replica = 0; replica < 4; ++replica) {
    Tensor x = at::rand({8, 2}, at::kDouble);
    x[2 * replica + 1][0] = TripwireImpl::kTrip;
    try {
      model(x);
      ADD_FAILURE() << "no error";
    } catch (const PeerFailed& error) {
      EXPECT_EQ(error.context().rank, replica);
      EXPECT_EQ(error.text(), "replica " + std::to_string(replica) + " of 4 failed: tripped");
      EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
    }
    x[2 * replica + 1][0] = 0;
    EXPECT_EQ(model(x).sizes(), x.sizes()) << "the replicas stay usable";
  }
}

/// Each replica finds the error on its own thread; a rank refuses one call all the same.
TEST(DataParallelTest, an_error_that_all_ranks_throw_leaves_the_group_usable) {
  testing::on_ranks(3, [](int) {
    Sequential net(SyncBatchNorm2d(3));
    DataParallelWithCallback model(net, cpus(2));
    const Tensor good = at::rand({4, 3, 2, 2});
    for (int round = 0; round < 30; ++round) {
      SCOPED_TRACE(round);
      EXPECT_THROW(model(at::rand({4, round % 2 == 0 ? 5 : 3, 2})), PeerFailed);
      ASSERT_EQ(model(good).sizes(), good.sizes());
    }
  });
}

TEST(DataParallelTest, an_error_of_one_ranks_replica_is_a_mismatch_of_the_others) {
  testing::on_ranks(2, [](int rank) {
    Sequential net(Tripwire(), SyncBatchNorm1d(2));
    net->to(at::kDouble);
    DataParallelWithCallback model(net, cpus(2));
    Tensor x = at::rand({4, 2}, at::kDouble);
    if (rank == 1) x[3][0] = TripwireImpl::kTrip;
    test::expect_contains(test::thrown<PeerFailed>([&] { model(x); }),
                          rank == 1 ? "tripped" : "refused SyncBatchNorm1d");
  });
}

TEST(DataParallelTest, one_value_per_channel_is_rejected_as_by_the_module) {
  Sequential net(SyncBatchNorm1d(2));
  DataParallelWithCallback model(net, cpus(2));
  for (const std::int64_t n : {1, 2}) {
    SCOPED_TRACE(n);
    if (n == 2) {
      EXPECT_NO_THROW(model(at::rand({n, 2})));
      continue;
    }
    try {
      model(at::rand({n, 2}));
      ADD_FAILURE() << "no error";
    } catch (const PeerFailed& error) {
      test::expect_contains(error.text(), "Expected more than 1 value per channel");
      EXPECT_THROW(std::rethrow_if_nested(error), UsageError);
    }
  }
}

TEST(DataParallelTest, nested) {
  Sequential inner = make_net(at::kDouble), plain = make_net(at::kDouble);
  convert_sync_batchnorm(inner);
  inner->eval();
  plain->eval();
  DataParallel model(inner, cpus(2));
  DataParallel outer(module_of([&model](const Tensor& x) { return model(x); }), cpus(3));
  const Tensor x = Random(1).normal({9, 2, 6, 6});
  const Tensor y = outer(x), y2 = plain->forward(x);
  EXPECT_LE(difference(y, y2), 1e-12);
  y.square().sum().backward();
  y2.square().sum().backward();
  EXPECT_LE(state_difference(inner, plain), 1e-10);

  std::function<Tensor(const Tensor&)> self;
  DataParallel own(module_of([&self](const Tensor& t) { return self(t); }), cpus(2));
  self = [&own](const Tensor& t) { return own(t); };
  EXPECT_THROW(own(x), PeerFailed);
}

struct UncloneableImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return x; }
};
TORCH_MODULE(Uncloneable);

TEST(DataParallelTest, misuse_is_rejected) {
  EXPECT_EQ(usage_error([] { DataParallel(Sequential(ReLU()), {}); }),
            "got no devices; {at::kCPU, at::kCPU} are two CPU workers");
  test::expect_contains(
      usage_error([] { DataParallel(Sequential(Linear(1, 1)), {at::Device("cuda:0")}); }),
      "expected the module on cuda:0");
  DataParallel two(module_of([](const Tensor& a, const Tensor&) { return a; }), cpus(2));
  EXPECT_EQ(usage_error([&] {
              two(at::rand({4, 1}), at::rand({3, 1}));
            }),
            "tensors have 4 and 3 samples along dim 0; expected the same number in all");
  DataParallel along(module_of([](const Tensor& a) { return a; }), cpus(2), std::nullopt, 2);
  EXPECT_EQ(usage_error([&] {
              along(at::rand({4, 1}));
            }),
            "cannot split a tensor of size [4, 1] along dim 2");
  DataParallel stuck(Uncloneable(), cpus(2));
  EXPECT_EQ(stuck(at::rand({1})).size(0), 1) << "one piece needs no copy";
  test::expect_contains(usage_error([&] { stuck(at::rand({2})); }),
                        "cannot copy the module: clone()");
  DataParallel odd(module_of([](const Tensor& a) {
                     return std::vector<Tensor>(static_cast<std::size_t>(a.size(0)), a);
                   }),
                   cpus(2));
  test::expect_contains(usage_error([&] { odd(at::rand({3})); }),
                        "cannot gather the replicas' outputs");
  DataParallel other_keys(module_of([](const Tensor& a) {
                            return std::map<std::int64_t, Tensor>{{a.size(0), a}};
                          }),
                          cpus(2));
  test::expect_contains(usage_error([&] { other_keys(at::rand({3})); }),
                        "cannot gather the replicas' outputs");
}

std::size_t n_threads_now() {
  std::size_t n = 0;
  for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    ++n;
  }
  return n;
}

std::size_t resident_mb() {
  std::size_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * 4096 / (1 << 20);
}

/// Throws about every `period`-th time that any of its copies is called.
struct UnreliableImpl : torch::nn::Cloneable<UnreliableImpl> {
  explicit UnreliableImpl(std::shared_ptr<std::atomic<unsigned>> shared_calls)
      : calls(std::move(shared_calls)) {}
  void reset() override {}
  Tensor forward(const Tensor& x) {
    constexpr unsigned kPeriod = 31;
    if (++*calls % kPeriod == 0) throw std::runtime_error("unreliable");
    return x;
  }
  std::shared_ptr<std::atomic<unsigned>> calls;
};
TORCH_MODULE(Unreliable);

TEST(DataParallelTest, a_thousand_mixed_steps_neither_hang_nor_grow) {
  const auto calls = std::make_shared<std::atomic<unsigned>>(0);
  Sequential net(Linear(2, 16), BatchNorm1d(16), Unreliable(calls), ReLU(), Linear(16, 16),
                 BatchNorm1d(16), Unreliable(calls), Linear(16, 2));
  convert_sync_batchnorm(net);
  DataParallelWithCallback model(net, cpus(4));
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  std::mt19937 random(1);
  const auto draw = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  std::size_t n_threads = 0, mb = 0;
  int n_thrown = 0, n_done = 0;
  for (int step = 0; step < 1000; ++step) {
    net->train(draw(3) > 0);
    try {
      const at::AutoGradMode grad(draw(4) > 0);
      const Tensor y = model(at::rand({2 + draw(20), 2}));
      if (y.requires_grad()) {
        optimizer.zero_grad();
        y.square().sum().backward();
        optimizer.step();
      }
      ++n_done;
    } catch (const PeerFailed& error) {
      test::expect_contains(error.text(), "failed: unreliable");
      ++n_thrown;
    }
    if (step == 300) {
      n_threads = n_threads_now();
      mb = resident_mb();
    }
  }
  EXPECT_GT(n_thrown, 100);
  EXPECT_GT(n_done, 100);
  EXPECT_EQ(n_threads_now(), n_threads);
  EXPECT_LE(resident_mb(), mb + 8);
}

/// The head's weight is the embedding's, as in language models.
struct TiedWeightsImpl : torch::nn::Cloneable<TiedWeightsImpl> {
  TiedWeightsImpl() { TiedWeightsImpl::reset(); }
  void reset() override {
    embedding = register_module("embedding", Embedding(7, 4));
    head = register_module("head", Linear(LinearOptions(4, 7).bias(false)));
    head->weight = embedding->weight;
  }
  Tensor forward(const Tensor& x) { return head(embedding(x)); }
  Embedding embedding{nullptr};
  Linear head{nullptr};
};
TORCH_MODULE(TiedWeights);

TEST(DataParallelTest, tied_weights_stay_tied) {
  TiedWeights net;
  net->to(at::kDouble);
  DataParallel model(net, cpus(2));
  const Tensor x = at::arange(7);
  const auto expect_same_as_module = [&](const char* what) {
    net->zero_grad();
    const Tensor expected = net(x);
    expected.square().sum().backward();
    const Tensor gradient = net->embedding->weight.grad().clone();
    net->zero_grad();
    const Tensor y = model(x);
    EXPECT_LE(difference(y, expected), 1e-12) << what;
    y.square().sum().backward();
    EXPECT_LE(difference(net->embedding->weight.grad(), gradient), 1e-10) << what;
  };
  expect_same_as_module("tied in reset");
  torch::optim::SGD(net->parameters(), 0.1).step();
  expect_same_as_module("after a step");
  net->head->weight = net->named_parameters()["head.weight"];
  expect_same_as_module("untied after the copies were made");
  EXPECT_TRUE(net->named_parameters()["head.weight"].grad().defined());
  net->head->weight = net->embedding->weight;
  expect_same_as_module("tied again");
  net->head->weight = at::rand({7, 4}, at::kDouble).requires_grad_();
  expect_same_as_module("a tensor that is not registered");
  EXPECT_TRUE(net->head->weight.grad().defined());
}

}  // namespace
}  // namespace lockstep::nn
