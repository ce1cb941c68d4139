#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "helpers.hpp"
#include "layer_ranks.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::difference;
using testing::on_ranks;
using testing::Random;
using testing::share_of;
namespace F = torch::nn::functional;

const testing::Shares kShares{4, 3, 2};
const testing::Shares kHalves{3, 3};

/// A model as users write it: typed members, which conversion cannot replace.
struct NetImpl : torch::nn::Module {
  torch::nn::Conv2d conv{2, 3, 3};
  torch::nn::BatchNorm2d bn{3};
  Tensor mean = register_buffer("mean", at::zeros({3})),
         var = register_buffer("var", at::ones({3}));
  NetImpl() {
    register_module("conv", conv);
    register_module("bn", bn);
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    Random random(3);
    for (auto& parameter : parameters()) parameter.copy_(random.normal(parameter.sizes()));
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = at::relu(bn(conv(x)));
    return F::batch_norm(h, mean, var, F::BatchNormFuncOptions().training(true).momentum(0.2));
  }
};
TORCH_MODULE(Net);

class ScopedLayerTest : public testing::LayerTest {};
INSTANTIATE_TEST_SUITE_P(over, ScopedLayerTest, ::testing::ValuesIn(testing::over_each()),
                         testing::name_of);

TEST_P(ScopedLayerTest, typed_members_and_functional_calls) {
  const Tensor batch = Random(1).normal({9, 2, 5, 5}), gradient = Random(2).normal({9, 3, 3, 3});
  Net whole;
  const Tensor expected = whole(batch);
  expected.backward(gradient);
  on(3, [&](int rank) {
    Net net;
    Tensor y;
    {
      const SyncBatchNormScope scope;
      y = net(share_of(batch, kShares, rank));
    }
    y.backward(share_of(gradient, kShares, rank));  // after the scope
    EXPECT_LE(difference(y, share_of(expected, kShares, rank)), 1e-12);
    for (const auto& buffer : whole->named_buffers()) {
      EXPECT_LE(difference(net->named_buffers()[buffer.key()], *buffer), 1e-12) << buffer.key();
    }
    for (const auto& parameter : whole->named_parameters()) {
      Tensor sum = net->named_parameters()[parameter.key()].grad().clone();
      all_reduce(sum);
      EXPECT_LE(difference(sum, parameter->grad()), 1e-11) << parameter.key();
    }
  });
}

TEST(SyncBatchNormScopeTest, without_one_everything_is_torchs) {
  on_ranks(2, [](int rank) {
    Net net;
    if (rank == 1) return;  // no rank is asked
    const Tensor x = Random(4).normal({4, 2, 5, 5});
    net(x).sum().backward();
    { const SyncBatchNormScope scope; }
    net(x).sum().backward();
    net->bn->eval();
    const SyncBatchNormScope scope;
    net->bn(net->conv(x)).sum().backward();  // eval: nothing to synchronise
    EXPECT_EQ(net->bn->num_batches_tracked.item<std::int64_t>(), 2);
  });
}

/// batch_norm's call is that of training then, so that a scope cannot tell; a layer can.
TEST_P(ScopedLayerTest, eval_without_running_statistics) {
  on(2, [](int rank) {
    const auto options = torch::nn::BatchNormOptions(1).affine(false).track_running_stats(false);
    torch::nn::Sequential net{torch::nn::BatchNorm1d(options)};
    net->eval();
    const Tensor mine = at::full({2, 1}, rank * 2.0);  // the mean of both ranks is 1
    {
      const SyncBatchNormScope scope;
      EXPECT_LE(difference(net->forward(mine), at::full({2, 1}, rank * 2.0 - 1)), 1e-4);
    }
    convert_sync_batchnorm(net);
    const SyncBatchNormScope scope;
    EXPECT_LE(difference(net->forward(mine), at::zeros({2, 1})), 1e-4);
  });
}

TEST_P(ScopedLayerTest, no_grad_and_inference_mode) {
  const Tensor batch = Random(5).normal({9, 3});
  torch::nn::BatchNorm1d whole(3);
  whole->to(at::kDouble);
  const Tensor expected = whole(batch);
  on(3, [&](int rank) {
    const Tensor mine = share_of(batch, kShares, rank);
    const SyncBatchNormScope scope;
    {
      const at::NoGradGuard no_grad;
      torch::nn::BatchNorm1d bn(3);
      bn->to(at::kDouble);
      EXPECT_LE(difference(bn(mine), share_of(expected, kShares, rank)), 1e-12);
      EXPECT_LE(difference(bn->running_var, whole->running_var), 1e-12);
    }
    const c10::InferenceMode inference;
    torch::nn::BatchNorm1d bn(3);
    bn->to(at::kDouble);
    EXPECT_LE(difference(bn(mine.clone()), share_of(expected, kShares, rank)), 1e-12);
    EXPECT_LE(difference(bn->running_var, whole->running_var), 1e-12);
  });
}

/// A scripted module, saved and loaded as one made by Python would be.
torch::jit::Module scripted() {
  torch::jit::Module module("Scripted");
  const Net net;
  for (const char* name : {"weight", "bias"}) {
    module.register_parameter(
        name, net->bn->named_parameters()[name].detach().clone().requires_grad_(), false);
  }
  module.register_buffer("mean", at::zeros({3}, at::kDouble));
  module.register_buffer("var", at::ones({3}, at::kDouble));
  module.define(R"(
    def forward(self, x):
      y = torch.batch_norm(x * 2, self.weight, self.bias, self.mean, self.var, True, 0.1, 1e-5, False)
      return torch.relu(y) + y * y
  )");
  std::stringstream file;
  module.save(file);
  return torch::jit::load(file);
}

/// Runs it until the profiling executor has replaced batch_norm by derivatives of its own.
void warm_up(torch::jit::Module& module, const Tensor& x) {
  for (int i = 0; i < 4; ++i) {
    module.forward({x.detach().clone().requires_grad_()}).toTensor().sum().backward();
  }
}

TEST(SyncBatchNormScopeTest, torch_script_modules) {
  const Tensor batch = Random(6).normal({9, 3, 4, 4}), gradient = Random(7).normal({9, 3, 4, 4});
  for (const bool warm : {false, true}) {
    auto whole = scripted();
    on_ranks(3, [&](int rank) {
      auto module = scripted();
      if (warm) warm_up(module, batch);
      for (auto buffer : module.buffers()) buffer.zero_();
      for (auto parameter : module.parameters()) parameter.mutable_grad().reset();
      for (int step = 0; step < 4; ++step) {
        const SyncBatchNormScope scope;
        const Tensor x = share_of(batch, kShares, rank).detach().clone().requires_grad_();
        const Tensor y = module.forward({x}).toTensor();
        y.backward(share_of(gradient, kShares, rank));

        const SyncBatchNormScope alone{Group()};
        const Tensor all = batch.detach().clone().requires_grad_();
        auto one = scripted();
        const Tensor expected = one.forward({all}).toTensor();
        expected.backward(gradient);
        EXPECT_LE(difference(y, share_of(expected, kShares, rank)), 1e-11) << warm << step;
        EXPECT_LE(difference(x.grad(), share_of(all.grad(), kShares, rank)), 1e-11) << warm << step;
        Tensor dweight = module.attr("weight").toTensor().grad().clone();
        all_reduce(dweight);
        EXPECT_LE(difference(dweight, one.attr("weight").toTensor().grad() * (step + 1)), 1e-10);
      }
      // 4 steps of the same batch from 0.
      const double share = 1 - std::pow(0.9, 4);
      const Tensor mean = (batch * 2).mean({0, 2, 3}) * share;
      EXPECT_LE(difference(module.attr("mean").toTensor(), mean), 1e-12);
    });
  }
}

/// The interpreter runs the operator itself at first. Then it differentiates it, and what it makes
/// of the operator's backward has no gradient: it is refused.
TEST(SyncBatchNormScopeTest, gradients_of_gradients_of_torch_script) {
  const Tensor batch = Random(6).normal({6, 3, 4, 4});
  const auto second_of = [](torch::jit::Module& module, const Tensor& part) {
    const Tensor x = part.detach().clone().requires_grad_();
    const Tensor y = module.forward({x}).toTensor().sum();
    const Tensor first =
        torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.pow(2).sum()}, {x})[0];
  };
  auto one = scripted();
  const SyncBatchNormScope alone{Group()};
  const Tensor expected = second_of(one, batch);
  for (const bool is_warm : {false, true}) {
    on_ranks(2, [&](int rank) {
      auto module = scripted();
      if (is_warm) warm_up(module, batch);
      const SyncBatchNormScope scope;
      const Tensor part = share_of(batch, kHalves, rank);
      std::string text = "no error";
      try {
        const Tensor second = second_of(module, part);
        EXPECT_LE(difference(second, share_of(expected, kHalves, rank)), 1e-10) << is_warm;
      } catch (const std::exception& error) {  // the interpreter makes it one of its own
        text = error.what();
      }
      EXPECT_EQ(
          text.find("TorchScript cannot take gradients of the gradients") != std::string::npos,
          is_warm)
          << text;
    });
  }
}

/// Its replicas are threads: each would have the statistics of its own piece.
TEST(SyncBatchNormScopeTest, a_data_parallel_in_it_is_rejected) {
  using torch::nn::BatchNorm2d, torch::nn::Sequential;
  const std::vector<at::Device> two_workers{at::kCPU, at::kCPU};
  const Tensor x = Random(12).normal({4, 3, 2, 2});
  const auto error_of = [](const std::function<void()>& f) {
    try {
      f();
    } catch (const Error& error) {
      return error.text();
    }
    return std::string("no error");
  };
  on_ranks(2, [&](int /*rank*/) {
    Sequential net(BatchNorm2d(3));
    net->to(at::kDouble);
    DataParallel model(net, two_workers);
    {
      const SyncBatchNormScope scope;
      const std::string text = error_of([&] { model(x); });
      EXPECT_NE(text.find("convert_sync_batchnorm"), std::string::npos) << text;
      EXPECT_NE(text.find("DataParallel"), std::string::npos) << text;
      net->eval();
      EXPECT_EQ(error_of([&] { model(x); }), "no error") << "nothing to synchronise";
      net->train();
    }
    model(x);  // without a scope it is torch's
    convert_sync_batchnorm(net);
    const SyncBatchNormScope scope;
    Sequential whole(BatchNorm2d(3));
    whole->to(at::kDouble);
    Tensor expected;
    {
      const SyncBatchNormScope alone{Group()};
      expected = whole->forward(x);
    }
    EXPECT_LE(difference(model(x), expected), 1e-12) << "layers of their own are synchronised";
  });
  struct ScopedImpl : torch::nn::Cloneable<ScopedImpl> {
    ScopedImpl() { reset(); }
    void reset() override { bn = register_module("bn", BatchNorm2d(3)); }
    Tensor forward(const Tensor& t) {
      const SyncBatchNormScope scope;
      return bn(t);
    }
    BatchNorm2d bn{nullptr};
  };
  const auto inside = std::make_shared<ScopedImpl>();
  inside->to(at::kDouble);
  DataParallel model(inside, two_workers);
  const std::string text = error_of([&] { model(x); });
  EXPECT_NE(text.find("convert_sync_batchnorm"), std::string::npos) << text;
}

/// In an optional it is made by a line of the standard library.
TEST(SyncBatchNormScopeTest, its_line_is_one_of_the_program) {
  std::optional<SyncBatchNormScope> scope;
  scope.emplace();
  EXPECT_EQ(SyncBatchNormScope::active()->where.line(), 0U);
  scope.reset();
  {
    const auto unique = std::make_unique<SyncBatchNormScope>();
    EXPECT_EQ(SyncBatchNormScope::active()->where.line(), 0U);
  }
  const unsigned line = std::source_location::current().line() + 1;
  const SyncBatchNormScope named;
  EXPECT_EQ(SyncBatchNormScope::active()->where.line(), line);
}

TEST(SyncBatchNormScopeTest, instance_norm_is_left_alone) {
  on_ranks(2, [](int rank) {
    torch::nn::InstanceNorm2d norm(torch::nn::InstanceNorm2dOptions(3).track_running_stats(true));
    const Tensor x = Random(8).normal({2, 3, 4, 4}, at::kFloat);
    if (rank == 1) return;
    const Tensor expected = norm(x);
    const SyncBatchNormScope scope;
    EXPECT_TRUE(norm(x).equal(expected));
  });
}

Tensor normalized(const Tensor& x) {
  return F::batch_norm(x, Tensor(), Tensor(), F::BatchNormFuncOptions().training(true));
}

TEST_P(ScopedLayerTest, the_inner_scope_holds_and_an_exception_ends_it) {
  const Tensor batch = Random(9).normal({6, 3});
  on(2, [&](int rank) {
    const Tensor mine = share_of(batch, kHalves, rank);
    const Tensor here = normalized(mine), everywhere = share_of(normalized(batch), kHalves, rank);
    const SyncBatchNormScope outer;
    EXPECT_LE(difference(normalized(mine), everywhere), 1e-12);
    {
      const SyncBatchNormScope inner{Group()};  // of this rank alone
      EXPECT_LE(difference(normalized(mine), here), 1e-12);
    }
    EXPECT_LE(difference(normalized(mine), everywhere), 1e-12);
    try {
      const SyncBatchNormScope inner{Group()};
      throw std::runtime_error("out of it");
    } catch (const std::runtime_error&) {
      EXPECT_LE(difference(normalized(mine), everywhere), 1e-12);
    }
  });
}

/// As generators of Python do.
TEST_P(ScopedLayerTest, scopes_may_end_in_any_order_and_on_any_thread) {
  const Tensor batch = Random(9).normal({6, 3});
  on(2, [&](int rank) {
    const Tensor mine = share_of(batch, kHalves, rank);
    const Tensor here = normalized(mine), everywhere = share_of(normalized(batch), kHalves, rank);
    std::optional<SyncBatchNormScope> outer(std::in_place), inner(std::in_place, Group());
    EXPECT_LE(difference(normalized(mine), here), 1e-12);
    outer.reset();
    EXPECT_LE(difference(normalized(mine), here), 1e-12);
    outer.emplace();
    inner.reset();
    EXPECT_LE(difference(normalized(mine), everywhere), 1e-12);
    std::thread([&] {
      EXPECT_FALSE(SyncBatchNormScope::active().has_value());
      outer.reset();
    }).join();
    EXPECT_FALSE(SyncBatchNormScope::active().has_value());
    EXPECT_LE(difference(normalized(mine), here), 1e-12);
  });
}

/// As activation checkpointing does.
TEST_P(ScopedLayerTest, a_forward_that_backward_repeats_needs_a_scope) {
  const Tensor batch = Random(11).normal({6, 3});
  on(2, [&](int rank) {
    const Tensor x = share_of(batch, kHalves, rank);
    torch::nn::BatchNorm1d bn(3);
    bn->to(at::kDouble);
    const auto forward = [&] {
      const Tensor y = bn(x);
      y.register_hook([&](const Tensor& gradient) {
        bn(x);
        return gradient;
      });
      return y;
    };
    Tensor y;
    {
      const SyncBatchNormScope scope;
      forward().sum().backward();
      y = forward();
    }
    const Tensor mean = bn->running_mean.clone();
    EXPECT_NE(testing::usage_error([&] { y.sum().backward(); }).find("inside the scope"),
              std::string::npos);
    EXPECT_TRUE(bn->running_mean.equal(mean));
    forward().sum().backward();  // of this rank alone
  });
}

TEST(SyncBatchNormScopeTest, on_one_rank_only_is_a_mismatch) {
  std::atomic<int> n_told{0};
  const auto body = [&](int rank) {
    torch::nn::BatchNorm1d bn(3);
    const Tensor x = at::ones({2, 3});
    Tensor loss = at::ones({1});
    try {
      std::optional<SyncBatchNormScope> scope;
      if (rank == 0) scope.emplace();
      bn(x);
      all_reduce(loss);
    } catch (const MismatchError& error) {
      ++n_told;
      EXPECT_NE(std::string(error.what()).find("all_gather"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("all_reduce"), std::string::npos) << error.what();
      throw;
    }
  };
  EXPECT_THROW(on_ranks(3, body), MismatchError);
  EXPECT_EQ(n_told, 3);
}

TEST_P(ScopedLayerTest, a_scope_alike_for_a_forward_that_is_repeated) {
  const Tensor batch = Random(9).normal({6, 3});
  EXPECT_FALSE(SyncBatchNormScope::active().has_value());
  on(2, [&](int rank) {
    std::optional<SyncBatchNormScope::Settings> settings;
    {
      const SyncBatchNormScope scope;
      settings = SyncBatchNormScope::active();
    }
    ASSERT_TRUE(settings.has_value());
    const SyncBatchNormScope again(*settings);
    torch::nn::BatchNorm1d bn(3);
    bn->to(at::kDouble);
    bn(share_of(batch, kHalves, rank));
    EXPECT_LE(difference(bn->running_mean, batch.mean(0) * 0.1), 1e-12);
  });
}

/// What TorchScript's executor calls, which may clone or offload what it keeps for backward.
struct ScriptForward {
  Tensor input = Random(10).normal({6, 3}), output, mean, invstd, reserve;
  std::int64_t implementation = 0;

  ScriptForward() {
    const SyncBatchNormScope scope;
    std::tie(output, mean, invstd, reserve, implementation) =
        at::_batch_norm_impl_index(input, {}, {}, {}, {}, true, 0.1, 1e-5, false);
  }
  Tensor backward(const Tensor& kept) const {
    const at::NoGradGuard no_graph;  // as a backward without create_graph
    return std::get<0>(
        at::_batch_norm_impl_index_backward(implementation, input, at::ones_like(input), {}, {}, {},
                                            mean, invstd, true, 1e-5, {true, false, false}, kept));
  }
};

TEST(SyncBatchNormScopeTest, what_script_keeps_may_be_cloned) {
  const ScriptForward forward;
  const Tensor expected = forward.backward(forward.reserve);
  EXPECT_TRUE(forward.backward(forward.reserve.clone()).equal(expected));
}

TEST(SyncBatchNormScopeTest, a_clone_that_outlives_what_script_kept_is_rejected) {
  ScriptForward forward;
  const Tensor clone = forward.reserve.clone();
  forward.reserve = Tensor();
  try {
    forward.backward(clone);
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_NE(error.text().find("clone"), std::string::npos) << error.text();
  }
  EXPECT_THROW(forward.backward(at::zeros({1}, at::kByte)), UsageError);
  EXPECT_THROW(forward.backward(at::zeros({3})), UsageError);
  EXPECT_THROW(forward.backward(Tensor()), UsageError);
}

TEST_P(ScopedLayerTest, wrong_input_is_rejected_before_anything_is_sent) {
  on(2, [](int /*rank*/) {
    const SyncBatchNormScope scope;
    const auto norm = [](const Tensor& x, const Tensor& weight) {
      return at::batch_norm(x, weight, {}, {}, {}, true, 0.1, 1e-5, false);
    };
    EXPECT_THROW(norm(at::ones({4}), {}), UsageError);
    EXPECT_THROW(norm(at::ones({4, 3}), at::ones({2})), UsageError);
    EXPECT_THROW(norm(at::ones({4, 3}), at::ones({3}, at::kDouble)), UsageError);
    EXPECT_EQ(norm(at::ones({1, 3}, at::kBFloat16), at::ones({3})).scalar_type(), at::kBFloat16);
  });
}

}  // namespace
}  // namespace lockstep::nn
