#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <cstring>
#include <lockstep/engine.hpp>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "helpers.hpp"
#include "layer_ranks.hpp"
#include "support/expect.hpp"

// Gradients of gradients through a batch normalisation over ranks, beside those of one device.
namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::channels_last, testing::difference, testing::on_ranks, testing::Random,
    testing::share_of, testing::Shares, testing::usage_error;
using torch::autograd::grad;

/// A gradient penalty that reaches every path: through all three gradients of the normalisation,
/// and through what comes before and after it. Sums, so that the ranks' penalties add up to that of
/// the whole batch.
struct Penalty {
  EpsMode eps_mode = EpsMode::plus;
  double eps = 1e-5;
  bool affine = true, input_needs_gradient = true;
  at::ScalarType type = at::kDouble;
  std::int64_t n = 12;

  Tensor x = Random(1).normal({n, 3, 4}), of_dx = Random(2).normal({n, 3, 4}),
         of_y = Random(3).normal({n, 3, 4});

  /// Of rank `rank`, or of the whole batch: the second gradients of x, weight and bias.
  template <class Norm>
  std::vector<Tensor> gradients(const Norm& norm, std::optional<Shares> shares, int rank) const {
    const auto part = [&](const Tensor& batch) {
      return (shares ? share_of(batch, *shares, rank) : batch).detach().clone();
    };
    const Tensor in = part(x).to(type).requires_grad_(input_needs_gradient);
    const Tensor weight = Random(4).normal({3}).add(2).to(type).requires_grad_();
    const Tensor bias = Random(5).normal({3}).to(type).requires_grad_();
    const Tensor y = norm(in * in + in, affine ? weight : Tensor(), affine ? bias : Tensor());
    const Tensor loss = (y.tanh() * part(of_y).to(type)).sum();
    std::vector<Tensor> leaves;
    if (affine) leaves = {weight, bias};
    if (input_needs_gradient) leaves.push_back(in);
    const auto first = grad({loss}, leaves, {}, /*retain_graph=*/true, /*create_graph=*/true);
    Tensor penalty = input_needs_gradient ? (first.back().pow(2) * part(of_dx).to(type)).sum()
                                          : at::zeros({}, type);
    if (affine) {
      penalty = penalty + (first[0] * Random(6).normal({3}).to(type)).sum() +
                (first[1] * Random(7).normal({3}).to(type)).sum();
    }
    penalty.backward();
    std::vector<Tensor> seconds;
    for (const Tensor& leaf : {in, weight, bias}) seconds.push_back(leaf.grad());
    return seconds;
  }

  /// By operators whose gradients libtorch has.
  Tensor composed(const Tensor& input, const Tensor& weight, const Tensor& bias) const {
    const Tensor mean = input.mean(at::IntArrayRef{0, 2}, /*keepdim=*/true);
    const Tensor var = (input - mean).pow(2).mean(at::IntArrayRef{0, 2}, /*keepdim=*/true);
    const Tensor h =
        (input - mean) / (eps_mode == EpsMode::plus ? var + eps : var.clamp_min(eps)).sqrt();
    return affine ? h * weight.view({1, 3, 1}) + bias.view({1, 3, 1}) : h;
  }

  void expect_equal(const Shares& shares, double tolerance,
                    const testing::Run& on = on_ranks) const {
    const auto whole =
        gradients([&](const auto&... tensors) { return composed(tensors...); }, std::nullopt, 0);
    on(static_cast<int>(shares.size()), [&](int rank) {
      SyncBatchNorm1d bn(SyncBatchNormOptions(3).eps(eps).eps_mode(eps_mode).affine(affine));
      bn->to(type);
      auto mine = gradients(
          [&](const Tensor& input, const Tensor& weight, const Tensor& bias) {
            if (affine) {
              bn->weight = weight;
              bn->bias = bias;
            }
            return bn->forward(input);
          },
          shares, rank);
      if (input_needs_gradient) {
        EXPECT_LE(difference(mine[0], share_of(whole[0], shares, rank)), tolerance);
      }
      for (const std::size_t i : {1U, 2U}) {
        if (!affine) continue;
        all_reduce(mine[i]);
        EXPECT_LE(difference(mine[i], whole[i]), tolerance) << i;
      }
    });
  }
};

class SecondGradientLayerTest : public testing::LayerTest {};
INSTANTIATE_TEST_SUITE_P(over, SecondGradientLayerTest, ::testing::ValuesIn(testing::over_each()),
                         testing::name_of);

TEST_P(SecondGradientLayerTest, ranks_are_one_device) {
  for (const Shares& shares : {Shares{12}, Shares{6, 6}, Shares{7, 1, 4}, Shares{3, 5, 0, 4}}) {
    Penalty().expect_equal(shares, 1e-10, GetParam().run);
  }
}

TEST(SecondGradientTest, of_float32) { Penalty{.type = at::kFloat}.expect_equal({5, 7}, 2e-3); }

TEST(SecondGradientTest, without_weight_and_bias) {
  Penalty{.affine = false}.expect_equal({5, 7}, 1e-10);
}

TEST(SecondGradientTest, of_an_input_without_gradient) {
  Penalty{.input_needs_gradient = false}.expect_equal({5, 7}, 1e-10);
}

/// The variances of the three channels are some 1 to 9: one is clamped, or some, or all.
TEST(SecondGradientTest, of_clamped_variances) {
  for (const double eps : {1e-5, 2.5, 4.0, 100.0}) {
    Penalty{.eps_mode = EpsMode::clamp, .eps = eps}.expect_equal({5, 7}, 1e-10);
  }
}

/// As libtorch's own batch normalisation, in two layouts, in a scope.
TEST_P(SecondGradientLayerTest, in_a_scope) {
  const Tensor batch = Random(8).normal({8, 3, 4, 4});
  const auto second_of = [](const Tensor& part) {
    torch::nn::BatchNorm2d bn(3);
    bn->to(at::kDouble);
    const Tensor x = part.detach().requires_grad_();
    const Tensor first =
        grad({bn->forward(x).sigmoid().sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    return std::vector{grad({first.pow(2).sum()}, {x})[0], first.detach()};
  };
  for (const Tensor& whole : {batch, channels_last(batch)}) {
    const auto expected = second_of(whole);
    on(2, [&](int rank) {
      const SyncBatchNormScope scope;
      const Tensor part = share_of(whole, Shares{3, 5}, rank);
      const auto mine = second_of(part);
      for (const std::size_t i : {0U, 1U}) {
        EXPECT_LE(difference(mine[i], share_of(expected[i], Shares{3, 5}, rank)), 1e-10);
      }
    });
  }
}

/// A critic or discriminator with two normalisations.
struct CriticImpl : torch::nn::Cloneable<CriticImpl> {
  CriticImpl() { reset(); }
  void reset() override {
    first =
        register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).bias(false)));
    bn1 = register_module("bn1", SyncBatchNorm2d(4));
    second = register_module("second", torch::nn::Conv2d(4, 3, 2));
    bn2 = register_module("bn2", SyncBatchNorm2d(3));
    last = register_module("last", torch::nn::Linear(3, 1));
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = bn2(second(at::leaky_relu(bn1(first(x)), 0.2))).tanh();
    return last(y.mean(at::IntArrayRef{2, 3}));
  }
  torch::nn::Conv2d first{nullptr}, second{nullptr};
  SyncBatchNorm2d bn1{nullptr}, bn2{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Critic);

/// The parameters after three steps of SGD, with the losses of a WGAN's critic and its gradient
/// penalty, or of a discriminator and its R1 penalty. `call` and `model` may be replicas.
std::vector<Tensor> train(bool is_wgan, const Tensor& real, const Tensor& fake, int n_ranks,
                          bool with_replicas = false) {
  Critic model;
  {
    const at::NoGradGuard no_grad;
    Random random(9);
    for (Tensor& parameter : model->parameters()) {
      parameter.set_data(random.normal(parameter.sizes()) * 0.5);
    }
  }
  model->to(at::kDouble);
  std::optional<DataParallel<Critic>> replicas;
  if (with_replicas) replicas.emplace(model, std::vector<at::Device>{at::kCPU, at::kCPU});
  const auto call = [&](const Tensor& x) { return replicas ? (*replicas)(x) : model(x); };
  torch::optim::SGD optimizer(model->parameters(), 0.05);
  for (int step = 0; step < 3; ++step) {
    const Tensor mixed = (0.3 * real + 0.7 * fake).detach().requires_grad_();
    const Tensor x = is_wgan ? mixed : real.detach().requires_grad_();
    const Tensor of_x =
        grad({call(x).sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    const Tensor norms = of_x.flatten(1).pow(2).sum(1);
    const Tensor penalty = is_wgan ? (norms.sqrt() - 1).pow(2).mean() * 10 : norms.mean() * 5;
    const Tensor of_fake = call(fake), of_real = call(real);
    const Tensor loss = is_wgan ? of_fake.mean() - of_real.mean()
                                : at::softplus(of_fake).mean() + at::softplus(-of_real).mean();
    optimizer.zero_grad();
    (loss + penalty).backward();
    for (Tensor& parameter : model->parameters()) {
      if (n_ranks > 1) all_reduce(parameter.mutable_grad(), ReduceOp::mean);
    }
    optimizer.step();
  }
  return model->parameters();
}

TEST(SecondGradientTest, wgan_gp_and_r1_over_ranks_are_one_rank) {
  const Tensor real = Random(10).normal({8, 2, 6, 6}), fake = Random(11).normal({8, 2, 6, 6});
  for (const bool is_wgan : {true, false}) {
    const auto alone = train(is_wgan, real, fake, 1);
    for (const int n : {2, 4}) {
      on_ranks(n, [&](int rank) {
        const Shares shares(static_cast<std::size_t>(n), 8 / n);
        const auto mine =
            train(is_wgan, share_of(real, shares, rank), share_of(fake, shares, rank), n);
        for (std::size_t i = 0; i < alone.size(); ++i) {
          EXPECT_LE(difference(mine[i], alone[i]), 1e-9) << i;
        }
      });
    }
  }
}

TEST(SecondGradientTest, replicas_of_ranks_are_one_rank) {
  const Tensor real = Random(10).normal({8, 2, 6, 6}), fake = Random(11).normal({8, 2, 6, 6});
  const auto alone = train(/*is_wgan=*/true, real, fake, 1);
  on_ranks(2, [&](int rank) {
    const Shares shares{4, 4};
    const auto mine = train(/*is_wgan=*/true, share_of(real, shares, rank),
                            share_of(fake, shares, rank), 2, /*with_replicas=*/true);
    for (std::size_t i = 0; i < alone.size(); ++i) {
      EXPECT_LE(difference(mine[i], alone[i]), 1e-9) << i;
    }
  });
}

TEST(SecondGradientTest, a_third_gradient_is_refused_by_name) {
  SyncBatchNorm1d bn(3);
  bn->to(at::kDouble);
  const Tensor x = Random(8).normal({4, 3}).requires_grad_();
  const Tensor first = grad({bn->forward(x).pow(3).sum()}, {x}, {}, true, true)[0];
  const Tensor penalty = first.pow(2).sum();
  const std::string text = [&]() -> std::string {
    try {
      grad({penalty}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "no error";
  }();
  test::expect_contains(
      text, {"second backward of SyncBatchNorm1d(3)", "third gradients are not supported"});
  EXPECT_NO_THROW(grad({penalty}, {x}));
}

/// Rank 0 of two, of which the other sends what this one sends: notes the numbers of a call.
class CountingEngine final : public Engine {
 public:
  explicit CountingEngine(std::vector<std::size_t>& counts) : counts_(counts) {}
  std::string_view name() const noexcept override { return "counting"; }
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 2; }
  void run(const lockstep::Call& call) override {
    counts_.push_back(call.count);
    const std::size_t n_bytes = call.count * size_of(call.dtype);
    if (call.op == Op::all_gather) {
      for (const std::size_t r : {0U, 1U}) {
        std::memcpy(static_cast<char*>(call.out) + r * n_bytes, call.in, n_bytes);
      }
    }
  }
  std::unique_ptr<Engine> split(const lockstep::Call&, int, int) override { return nullptr; }
  std::unique_ptr<SharedMemory> allocate(const lockstep::Call&) override { return nullptr; }
  void abandon(std::string_view) noexcept override {}
  void leave(std::string_view) noexcept override {}

 private:
  std::vector<std::size_t>& counts_;
};

/// 1 + 2C numbers in forward, 2C in backward, 5C in its backward, of C = 3 channels.
TEST(SecondGradientTest, each_pass_sends_one_message) {
  using Counts = std::vector<std::size_t>;
  for (const bool input_needs_gradient : {true, false}) {
    Counts counts;
    const Group group(std::make_unique<CountingEngine>(counts), "counted",
                      std::chrono::milliseconds(1000));
    SyncBatchNorm1d bn(SyncBatchNormOptions(3).group(group));
    bn->to(at::kDouble);
    const Tensor x = Random(8).normal({4, 3}).requires_grad_(input_needs_gradient);
    const Tensor loss = bn->forward(x).pow(3).sum();
    EXPECT_EQ(counts, Counts{7});
    const std::vector<Tensor> leaves{input_needs_gradient ? x : bn->weight};
    const Tensor first = grad({loss}, leaves, {}, true, /*create_graph=*/true)[0];
    EXPECT_EQ(counts, input_needs_gradient ? (Counts{7, 6}) : Counts{7});
    first.pow(2).sum().backward();
    // The second backward, and the backward that goes on from there.
    EXPECT_EQ(counts, input_needs_gradient ? (Counts{7, 6, 15, 6}) : Counts{7});
  }
}

/// A rank that leaves the penalty out does not take part in the message of its backward.
TEST(SecondGradientTest, a_rank_without_the_penalty_is_named) {
  run_ranks(2,
            [](int rank) {
              SyncBatchNorm1d bn(3);
              const Tensor x = Random(8).normal({4, 3}, at::kFloat).requires_grad_();
              const Tensor first = grad({bn->forward(x).pow(3).sum()}, {x}, {}, true, true)[0];
              if (rank == 1) return;
              try {
                first.pow(2).sum().backward();
                ADD_FAILURE() << "no error";
              } catch (const PeerLost& error) {
                EXPECT_EQ(error.context().peers, std::vector{1}) << error.what();
              } catch (const TimeoutError& error) {
                EXPECT_EQ(error.context().peers, std::vector{1}) << error.what();
              }
            },
            {.timeout = std::chrono::milliseconds(500)});
}

}  // namespace
}  // namespace lockstep::nn
