#include <lockstep/nn/replication.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>
#include <string>
#include <thread>
#include <vector>

#include "helpers.hpp"
#include "support/expect.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::difference;
using testing::Random;
using testing::usage_error;
using torch::nn::BatchNorm1d, torch::nn::Linear, torch::nn::ReLU, torch::nn::Sequential;
using ModulePtr = std::shared_ptr<torch::nn::Module>;

struct Call {
  std::string module;
  int copy_id;
  int n_before;  ///< calls with this context
};

struct TellerImpl : torch::nn::Cloneable<TellerImpl>, ReplicationCallback {
  TellerImpl(std::string name, std::vector<Call>* calls) : id(std::move(name)), log(calls) {}
  void reset() override {}
  Tensor forward(const Tensor& x) { return x; }
  void on_replicate(CallbackContext& context, int copy_id) override {
    log->push_back({id, copy_id, context.state<int>()++});
    context.state<std::string>() += id;
  }
  std::string id;
  std::vector<Call>* log;
};
TORCH_MODULE(Teller);

/// A Sequential inside: torch lets none stand in another by itself.
struct BoxImpl : torch::nn::Cloneable<BoxImpl> {
  explicit BoxImpl(const Sequential& modules) : inner(register_module("inner", modules)) {}
  void reset() override { inner = register_module("inner", Sequential()); }
  Tensor forward(const Tensor& x) { return inner->forward(x); }
  Sequential inner;
};
TORCH_MODULE(Box);

std::string text_of(const std::vector<Call>& calls) {
  std::string text;
  for (const auto& [module, copy_id, n_before] : calls) {
    text += module + std::to_string(copy_id) + "/" + std::to_string(n_before) + " ";
  }
  return text;
}

TEST(ReplicationTest, copy_0_first_and_one_context_per_submodule) {
  std::vector<Call> calls;
  const Sequential net(Teller("a", &calls), ReLU(), Box(Sequential(Teller("b", &calls))));
  const std::vector<ModulePtr> copies{net.ptr(), net->clone(), net->clone()};
  execute_replication_callbacks(copies);
  EXPECT_EQ(text_of(calls), "a0/0 b0/0 a1/1 b1/1 a2/2 b2/2 ");
  calls.clear();
  execute_replication_callbacks(copies);
  EXPECT_EQ(text_of(calls), "a0/0 b0/0 a1/1 b1/1 a2/2 b2/2 ") << "contexts are new";
}

TEST(ReplicationTest, a_submodule_in_two_places_is_one) {
  std::vector<Call> calls;
  const Teller shared("a", &calls);
  const Sequential net(shared, ReLU(), shared);
  const std::vector<ModulePtr> copies{net.ptr(), net->clone()};  // the clone has two
  execute_replication_callbacks(copies);
  EXPECT_EQ(text_of(calls), "a0/0 a1/1 a1/2 ");
}

TEST(ReplicationTest, rejects_different_structures) {
  std::vector<Call> calls;
  const auto of = [&](auto... modules) {
    return ModulePtr(Sequential(Teller("a", &calls), Box(Sequential(modules...))).ptr());
  };
  const auto error_of = [](std::vector<ModulePtr> copies) {
    return usage_error([&] { execute_replication_callbacks(copies); });
  };
  EXPECT_EQ(error_of({of(ReLU(), Linear(2, 2)), of(ReLU(), Linear(2, 2)), of(ReLU(), ReLU())}),
            "copy 2 differs from copy 0: '1.inner.1' is a torch::nn::ReLUImpl, but a "
            "torch::nn::LinearImpl in copy 0; make the copies from one module");
  EXPECT_EQ(error_of({of(ReLU()), of(ReLU(), ReLU())}),
            "copy 1 differs from copy 0: '1.inner' (torch::nn::SequentialImpl) has 2 submodules, "
            "but 1 in copy 0; make the copies from one module");
  EXPECT_EQ(error_of({of(ReLU()), ReLU().ptr()}),
            "copy 1 differs from copy 0: the module itself is a torch::nn::ReLUImpl, but a "
            "torch::nn::SequentialImpl in copy 0; make the copies from one module");
  EXPECT_EQ(error_of({of(ReLU()), nullptr}), "copy 1 is null");
  EXPECT_EQ(error_of({}), "got no copies; expected at least copy 0");
  EXPECT_TRUE(calls.empty());
}

TEST(ReplicationTest, ones_own_replicate_gets_the_callbacks) {
  std::vector<Call> calls;
  const auto replicate = patch_replication_callback([](const Sequential& net, int n) {
    std::vector<Sequential> copies{net};
    while (static_cast<int>(copies.size()) < n) {
      copies.emplace_back(std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone()));
    }
    return copies;
  });
  EXPECT_EQ(replicate(Sequential(Teller("a", &calls)), 3).size(), 3U);
  EXPECT_EQ(text_of(calls), "a0/0 a1/1 a2/2 ");
}

/// Writes down what a callback can know.
struct CuriousImpl : torch::nn::Cloneable<CuriousImpl>, ReplicationCallback {
  explicit CuriousImpl(std::vector<std::string>* notes) : log(notes) {}
  void reset() override {}
  Tensor forward(const Tensor& x) { return x; }
  void on_replicate(CallbackContext& context, int copy_id) override {
    log->push_back(std::to_string(copy_id) + " of " + std::to_string(context.n_copies()) + " on " +
                   context.device().str() + (context.original() == nullptr ? "" : " of one"));
    original = context.original();
  }
  std::vector<std::string>* log;
  torch::nn::Module* original = nullptr;
};
TORCH_MODULE(Curious);

TEST(ReplicationTest, callbacks_know_the_number_the_device_and_the_original) {
  std::vector<std::string> log;
  const Curious original(&log);
  const Sequential net(original, Linear(2, 2));
  const std::vector<ModulePtr> copies{net->clone(), net->clone()};
  execute_replication_callbacks(copies);
  EXPECT_EQ(log, (std::vector<std::string>{"0 of 2 on cpu", "1 of 2 on cpu"}));
  log.clear();
  execute_replication_callbacks(copies, {.original = net.ptr(), .devices = {at::kCPU, at::kCUDA}});
  EXPECT_EQ(log, (std::vector<std::string>{"0 of 2 on cpu of one", "1 of 2 on cuda of one"}));
  const auto copy = copies[1]->named_children()["0"];
  EXPECT_EQ(copy->as<Curious>()->original, original.get());
  EXPECT_EQ(usage_error([&] { execute_replication_callbacks(copies, {.devices = {at::kCPU}}); }),
            "got 1 devices, expected one for each of 2 copies");
  test::expect_contains(
      usage_error([&] { execute_replication_callbacks(copies, {.original = ReLU().ptr()}); }),
      "the original differs from copy 0");
}

TEST(ReplicationTest, data_parallel_says_what_it_copied) {
  std::vector<std::string> log;
  Sequential net(Curious(&log), Linear(2, 2));
  DataParallel<Sequential> model(net, {at::kCPU, at::kCPU, at::kCPU});
  model(at::ones({2, 2}));
  EXPECT_EQ(log, (std::vector<std::string>{"0 of 2 on cpu of one", "1 of 2 on cpu of one"}));
}

std::vector<ModulePtr> cloned_twice(const Sequential& net) { return {net->clone(), net->clone()}; }

struct Overloaded {
  std::vector<ModulePtr> operator()(const Sequential& net) const { return cloned_twice(net); }
  std::vector<ModulePtr> operator()(const Sequential& net, int /*n*/) const {
    return cloned_twice(net);
  }
};

TEST(ReplicationTest, patch_takes_functions_only) {
  static_assert(ReplicateFunction<decltype(&cloned_twice)>);
  static_assert(ReplicateFunction<Overloaded>);
  static_assert(ReplicateFunction<std::function<std::vector<ModulePtr>(int)>>);
  static_assert(!ReplicateFunction<int>);
  static_assert(!ReplicateFunction<Sequential*>);
  static_assert(!ReplicateFunction<std::vector<ModulePtr>>);
  static_assert(!ReplicateFunction<Call>);
  const auto generic = [](const auto& net, auto... rest) { return Overloaded()(net, rest...); };
  static_assert(ReplicateFunction<decltype(generic)>);

  std::vector<std::string> log;
  const Sequential net{Curious(&log)};
  EXPECT_EQ(patch_replication_callback(cloned_twice)(net).size(), 2U);
  EXPECT_EQ(patch_replication_callback(Overloaded())(net, 2).size(), 2U);
  EXPECT_EQ(patch_replication_callback(generic)(net).size(), 2U);
  EXPECT_EQ(log[5], "1 of 2 on cpu of one");
}

/// Forward of every copy on its own piece, on its own thread.
std::vector<Tensor> forward_all(const std::vector<SyncBatchNorm1d>& copies,
                                const std::vector<Tensor>& pieces) {
  std::vector<Tensor> outputs(copies.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    threads.emplace_back([&, i] { outputs[i] = SyncBatchNorm1d(copies[i])->forward(pieces[i]); });
  }
  for (auto& thread : threads) thread.join();
  return outputs;
}

struct Rows {
  Tensor x, dy;
};

/// Channels of ordinary, of small and of no variance: eps matters for the last two.
Rows rows(std::int64_t n) {
  Random random(5);
  const Tensor scale = at::tensor({1.0, 30.0, 1e-3, 0.0});
  return {random.normal({n, 4}) * scale + at::tensor({0.0, 5.0, -1.0, 2.0}), random.normal({n, 4})};
}

TEST(ReplicatedBatchNormTest, numbers_of_the_definition_with_plus_and_clamp) {
  for (const EpsMode mode : {EpsMode::plus, EpsMode::clamp}) {
    for (const bool affine : {true, false}) {
      for (const int n_copies : {1, 2, 3}) {
        SCOPED_TRACE(::testing::Message() << "mode " << static_cast<int>(mode) << " affine "
                                          << affine << " copies " << n_copies);
        const auto [batch, dy] = rows(12);
        SyncBatchNorm1d bn(SyncBatchNormOptions(4).momentum(1.0).affine(affine).eps_mode(mode));
        bn->to(at::kDouble);
        std::vector<SyncBatchNorm1d> copies{bn};
        for (int i = 1; i < n_copies; ++i) {
          copies.emplace_back(std::dynamic_pointer_cast<SyncBatchNorm1dImpl>(bn->clone()));
        }
        execute_replication_callbacks(copies);
        const Tensor x = batch.clone().requires_grad_();
        const Tensor y = at::cat(forward_all(copies, x.chunk(n_copies)));
        y.backward(dy);

        const Tensor x2 = batch.clone().requires_grad_();
        const Tensor mean = x2.mean(0), var = (x2 - mean).square().mean(0);
        const Tensor safe = mode == EpsMode::plus ? var + 1e-5 : var.clamp_min(1e-5);
        const Tensor y2 = (x2 - mean) / safe.sqrt();
        y2.backward(dy);
        EXPECT_LE(difference(y, y2), 1e-12);
        EXPECT_LE(difference(x.grad(), x2.grad()) / testing::largest(x2.grad()), 1e-12);
        EXPECT_LE(difference(bn->running_mean, mean), 1e-12);
        EXPECT_LE(difference(bn->running_var, var * 12 / 11), 1e-11);
        if (!affine) continue;
        Tensor weight_gradient = at::zeros({4}, at::kDouble), bias_gradient = weight_gradient;
        for (const auto& copy : copies) {
          weight_gradient = weight_gradient + copy->weight.grad();
          bias_gradient = bias_gradient + copy->bias.grad();
        }
        EXPECT_LE(difference(weight_gradient, (dy * y2).sum(0)), 1e-12);
        EXPECT_LE(difference(bias_gradient, dy.sum(0)), 1e-12);
      }
    }
  }
}

TEST(ReplicatedBatchNormTest, an_output_that_is_not_used) {
  const auto [batch, dy] = rows(6);
  SyncBatchNorm1d bn(SyncBatchNormOptions(4).affine(false));
  bn->to(at::kDouble);
  const std::vector<SyncBatchNorm1d> copies{
      bn, SyncBatchNorm1d(std::dynamic_pointer_cast<SyncBatchNorm1dImpl>(bn->clone()))};
  execute_replication_callbacks(copies);
  const Tensor x = batch.clone().requires_grad_();
  forward_all(copies, x.chunk(2))[0].backward(dy.narrow(0, 0, 3));
  const Tensor x2 = batch.clone().requires_grad_();
  at::batch_norm(x2, {}, {}, {}, {}, true, 0.1, 1e-5, false)
      .narrow(0, 0, 3)
      .backward(dy.narrow(0, 0, 3));
  EXPECT_LE(difference(x.grad(), x2.grad()) / testing::largest(x2.grad()), 1e-12);
}

TEST(ReplicatedBatchNormTest, over_replicas_and_ranks) {
  testing::on_ranks(2, [](int rank) {
    const auto [batch, dy] = rows(12);
    const auto part = [&](const Tensor& t) { return t.narrow(0, rank * 5, rank == 0 ? 5 : 7); };
    SyncBatchNorm1d bn(4);
    bn->to(at::kDouble);
    std::vector<SyncBatchNorm1d> copies{bn};
    for (int i = 0; i < rank; ++i) {  // rank 0 has none but itself
      copies.emplace_back(std::dynamic_pointer_cast<SyncBatchNorm1dImpl>(bn->clone()));
    }
    execute_replication_callbacks(copies);
    const Tensor x = part(batch).clone().requires_grad_();
    at::cat(forward_all(copies, x.chunk(rank + 1))).backward(part(dy));

    BatchNorm1d reference(4);
    reference->to(at::kDouble);
    const Tensor x2 = batch.clone().requires_grad_();
    reference->forward(x2).backward(dy);
    EXPECT_LE(difference(x.grad(), part(x2.grad())) / testing::largest(x2.grad()), 1e-12);
    EXPECT_LE(difference(bn->running_var, reference->running_var), 1e-12);
  });
}

std::vector<SyncBatchNorm1d> two_copies(SyncBatchNorm1d bn) {
  std::vector<SyncBatchNorm1d> copies{
      bn, SyncBatchNorm1d(std::dynamic_pointer_cast<SyncBatchNorm1dImpl>(bn->clone()))};
  execute_replication_callbacks(copies);
  return copies;
}

/// A moving average of the weights is such a clone.
TEST(ReplicatedBatchNormTest, a_clone_of_a_replica_is_on_its_own) {
  SyncBatchNorm1d bn(4);
  bn->to(at::kDouble);
  const auto copies = two_copies(bn);
  const Tensor batch = rows(6).x;
  BatchNorm1d reference(4);
  reference->to(at::kDouble);
  const Tensor expected = reference->forward(batch);
  for (const auto& copy : copies) {
    SyncBatchNorm1d clone(std::dynamic_pointer_cast<SyncBatchNorm1dImpl>(copy->clone()));
    EXPECT_LE(difference(clone->forward(batch), expected), 1e-12);
  }
}

TEST(ReplicatedBatchNormTest, half_precision_with_a_float_state) {
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    const Tensor batch = Random(5).normal({12, 4}, type), dy = Random(6).normal({12, 4}, type);
    SyncBatchNorm1d bn(4);
    const Tensor x = batch.clone().requires_grad_();
    const Tensor y = at::cat(forward_all(two_copies(bn), x.chunk(2)));
    EXPECT_EQ(y.scalar_type(), type);
    y.backward(dy);
    BatchNorm1d reference(4);
    const Tensor x2 = batch.to(at::kFloat).requires_grad_();
    const Tensor y2 = reference->forward(x2);
    y2.backward(dy.to(at::kFloat));
    EXPECT_LE(difference(y, y2), 2e-2);
    EXPECT_LE(difference(x.grad(), x2.grad()), 2e-2);
    EXPECT_LE(difference(bn->running_var, reference->running_var), 1e-6);
  }
}

/// torch clones it as a plain Sequential; where it stands in one, as nothing.
struct StageImpl : torch::nn::SequentialImpl {
  using SequentialImpl::SequentialImpl;
  Tensor forward(const Tensor& x) { return SequentialImpl::forward(x) * 2; }
};
TORCH_MODULE(Stage);

struct CloneableStageImpl : StageImpl {
  using StageImpl::StageImpl;
  ModulePtr clone(const torch::optional<at::Device>& device = {}) const override {
    const auto plain = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(
        torch::nn::SequentialImpl::clone(device));
    auto copy = std::make_shared<CloneableStageImpl>();
    for (const auto& module : *plain) copy->push_back(module);
    return copy;
  }
};
TORCH_MODULE(CloneableStage);

TEST(ReplicationTest, a_class_derived_from_sequential_needs_a_clone_of_its_own) {
  const std::vector<at::Device> two{at::kCPU, at::kCPU};
  const Tensor x = at::ones({2, 2});
  DataParallel inside(Sequential(Stage(Linear(2, 2)), Linear(2, 1)), two);
  DataParallel itself(Stage(Linear(2, 2)), two);
  DataParallel box(Box(Sequential(ReLU(), Stage(Linear(2, 2)))), two);
  for (const std::string& text : {usage_error([&] { inside(x); }), usage_error([&] { itself(x); }),
                                  usage_error([&] { box(x); })}) {
    test::expect_contains(text, {"StageImpl", "clone() of its own"});
  }
  test::expect_contains(usage_error([&] { inside(x); }), "'0'");
  test::expect_contains(usage_error([&] { box(x); }), "'inner.1'");

  Sequential net(CloneableStage(Linear(2, 2)), Linear(2, 1));
  DataParallel works(net, two);
  EXPECT_EQ(difference(works(x), net->forward(x)), 0);
}

TEST(ReplicationTest, a_copy_without_a_submodule_is_rejected) {
  Sequential net(Stage(Linear(2, 2)));
  const std::vector<ModulePtr> copies{net.ptr(), net->clone()};
  test::expect_contains(usage_error([&] { execute_replication_callbacks(copies); }), "copy 1");
}

TEST(ReplicatedBatchNormTest, a_nan_in_one_replica_keeps_the_statistics_of_all) {
  SyncBatchNorm1d bn(SyncBatchNormOptions(4).on_nonfinite(OnNonfinite::keep_running_stats));
  const auto copies = two_copies(bn);
  Tensor batch = Random(5).normal({6, 4}, at::kFloat);
  batch[5][1] = std::nan("");
  forward_all(copies, batch.chunk(2));
  for (const auto& copy : copies) {
    EXPECT_EQ(copy->n_nonfinite_batches(), 1);
    EXPECT_EQ(copy->num_batches_tracked.item<std::int64_t>(), 0);
  }
  EXPECT_TRUE(bn->running_var.eq(1).all().item<bool>());
}

TEST(ReplicatedBatchNormTest, a_module_in_data_parallel_counts_nonfinite_batches) {
  Sequential net(SyncBatchNorm1d(4));
  auto* const layer = net->ptr(0)->as<SyncBatchNorm1d>();
  DataParallel<Sequential> model(net, {at::kCPU, at::kCPU});
  Tensor batch = Random(5).normal({6, 4}, at::kFloat);
  model(batch);
  EXPECT_EQ(layer->n_nonfinite_batches(), 0);
  batch[5][1] = std::nan("");
  model(batch);
  model(batch);
  EXPECT_EQ(layer->n_nonfinite_batches(), 2);
  DataParallel<Sequential> alone(net, {at::kCPU});
  alone(batch);
  EXPECT_EQ(layer->n_nonfinite_batches(), 3);
}

TEST(ReplicatedBatchNormTest, the_module_works_alone_when_its_copies_are_gone) {
  const auto [batch, dy] = rows(6);
  SyncBatchNorm1d bn(4);
  bn->to(at::kDouble);
  {
    const std::vector<SyncBatchNorm1d> copies{
        bn, SyncBatchNorm1d(std::dynamic_pointer_cast<SyncBatchNorm1dImpl>(bn->clone()))};
    execute_replication_callbacks(copies);
    forward_all(copies, batch.chunk(2));
  }
  EXPECT_EQ(bn->forward(batch).sizes(), batch.sizes());
}

}  // namespace
}  // namespace lockstep::nn
