#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <functional>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "group/native_engine.hpp"
#include "helpers.hpp"
#include "layer_ranks.hpp"
#include "nn/batch_norm/layer_steps.hpp"
#include "support/ranks.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::difference;
using testing::on_ranks;
using testing::Random;
using testing::share_of;
using testing::usage_error;

enum class Layout { contiguous, channels_last, strided };

struct LayerCase {
  std::vector<std::int64_t> sizes;  // without the batch
  testing::Shares shares;
  Layout layout = Layout::contiguous;
  at::ScalarType type = at::kDouble;
};

std::ostream& operator<<(std::ostream& stream, const LayerCase& c) {
  return stream << "sizes " << c10::str(c.sizes) << " shares " << c10::str(c.shares) << " layout "
                << static_cast<int>(c.layout) << ' ' << c10::toString(c.type);
}

/// The same values, laid out as asked.
Tensor laid_out(const Tensor& tensor, Layout layout) {
  switch (layout) {
    case Layout::contiguous: return tensor.contiguous();
    case Layout::channels_last: return testing::channels_last(tensor);
    case Layout::strided: return testing::strided(tensor);
  }
  return {};
}

/// What a batch normalisation makes of one batch.
struct Outcome {
  Tensor output, input_gradient, weight_gradient, bias_gradient, running_mean, running_var;
  std::int64_t n_batches = 0;
};

template <class Holder>
Outcome run_module(Holder bn, const Tensor& input, const Tensor& output_gradient,
                   const Tensor& weight, const Tensor& bias) {
  bn->to(input.scalar_type());
  {
    const at::NoGradGuard no_grad;
    bn->weight.copy_(weight);
    bn->bias.copy_(bias);
  }
  // A detached clone keeps a dense layout, but packs a strided one: so the leaf is a view's base.
  const Tensor x = input.detach();
  x.requires_grad_();
  const Tensor output = bn->forward(x);
  output.backward(output_gradient);
  return {output,
          x.grad(),
          bn->weight.grad(),
          bn->bias.grad(),
          bn->running_mean,
          bn->running_var,
          bn->num_batches_tracked.template item<std::int64_t>()};
}

template <class Options>
Outcome run(const Options& options, const Tensor& input, const Tensor& output_gradient,
            const Tensor& weight, const Tensor& bias) {
  constexpr bool kSync = std::is_same_v<Options, SyncBatchNormOptions>;
  using One = std::conditional_t<kSync, SyncBatchNorm1d, torch::nn::BatchNorm1d>;
  using Two = std::conditional_t<kSync, SyncBatchNorm2d, torch::nn::BatchNorm2d>;
  using Three = std::conditional_t<kSync, SyncBatchNorm3d, torch::nn::BatchNorm3d>;
  switch (input.dim()) {
    case 5: return run_module(Three(options), input, output_gradient, weight, bias);
    case 4: return run_module(Two(options), input, output_gradient, weight, bias);
    default: return run_module(One(options), input, output_gradient, weight, bias);
  }
}

struct Batch {
  Tensor input, output_gradient, weight, bias;
};

Batch batch_of(const LayerCase& c, double mean) {
  Random random(1);
  std::vector<std::int64_t> sizes{0};
  for (const auto share : c.shares) sizes[0] += share;
  sizes.insert(sizes.end(), c.sizes.begin(), c.sizes.end());
  const auto channels = c.sizes[0];
  return {random.normal(sizes).add_(mean).to(c.type), random.normal(sizes, c.type),
          random.normal({channels}, c.type).abs_().add_(0.1), random.normal({channels}, c.type)};
}

/// The ranks' outcomes put together again: what one rank with the whole batch should have.
Outcome run_on_ranks(const LayerCase& c, const Batch& batch,
                     const testing::Run& run_ranks = on_ranks) {
  const auto n_ranks = static_cast<int>(c.shares.size());
  std::vector<Outcome> outcomes(c.shares.size());
  run_ranks(n_ranks, [&](int rank) {
    const Tensor input = laid_out(share_of(batch.input, c.shares, rank), c.layout);
    const Tensor gradient = share_of(batch.output_gradient, c.shares, rank);
    auto& outcome = outcomes[static_cast<std::size_t>(rank)];
    outcome = run(SyncBatchNormOptions(c.sizes[0]), input, gradient, batch.weight, batch.bias);
    if (c.layout == Layout::channels_last) {
      EXPECT_TRUE(testing::is_channels_last(outcome.output));
      EXPECT_TRUE(testing::is_channels_last(outcome.input_gradient));
    }
  });
  Outcome whole = outcomes[0];
  std::vector<Tensor> outputs, input_gradients;
  for (const Outcome& outcome : outcomes) {
    outputs.push_back(outcome.output.detach());
    input_gradients.push_back(outcome.input_gradient);
    EXPECT_TRUE(outcome.running_mean.equal(outcomes[0].running_mean)) << "not the same bits";
    EXPECT_TRUE(outcome.running_var.equal(outcomes[0].running_var)) << "not the same bits";
    if (&outcome == outcomes.data()) continue;
    whole.weight_gradient = whole.weight_gradient + outcome.weight_gradient;
    whole.bias_gradient = whole.bias_gradient + outcome.bias_gradient;
  }
  whole.output = at::cat(outputs);
  whole.input_gradient = at::cat(input_gradients);
  return whole;
}

void expect_equal(const Outcome& got, const Outcome& expected, double tolerance) {
  const auto near = [&](const Tensor& a, const Tensor& b, const char* what) {
    EXPECT_EQ(a.sizes(), b.sizes()) << what;
    EXPECT_LE(difference(a, b), tolerance * std::max(1.0, testing::largest(b.detach()))) << what;
  };
  near(got.output, expected.output, "output");
  near(got.input_gradient, expected.input_gradient, "input gradient");
  near(got.weight_gradient, expected.weight_gradient, "weight gradient");
  near(got.bias_gradient, expected.bias_gradient, "bias gradient");
  near(got.running_mean, expected.running_mean, "running_mean");
  near(got.running_var, expected.running_var, "running_var");
  EXPECT_EQ(got.n_batches, expected.n_batches);
}

class SyncBatchNormTest : public ::testing::TestWithParam<LayerCase> {};

TEST_P(SyncBatchNormTest, equals_batch_norm_of_the_whole_batch) {
  const LayerCase& c = GetParam();
  const Batch batch = batch_of(c, /*mean=*/0.5);
  const Outcome expected = run(torch::nn::BatchNormOptions(c.sizes[0]), batch.input,
                               batch.output_gradient, batch.weight, batch.bias);
  expect_equal(run_on_ranks(c, batch), expected, c.type == at::kDouble ? 1e-12 : 1e-5);
}

std::vector<LayerCase> all_cases() {
  std::vector<LayerCase> cases;
  const std::vector<std::vector<std::int64_t>> shapes{{5}, {4, 7}, {3, 5, 6}, {8, 2, 3, 4}, {1, 9}};
  const std::vector<testing::Shares> shares{{8},          {4, 4},       {7, 1},      {8, 0},
                                            {5, 2, 1},    {0, 3, 5},    {1, 1, 1},   {2, 2, 2},
                                            {1, 0, 4, 3}, {2, 2, 2, 2}, {0, 0, 0, 3}};
  for (const auto& shape : shapes) {
    for (const auto& share : shares) {
      for (const Layout layout : {Layout::contiguous, Layout::channels_last, Layout::strided}) {
        if (layout == Layout::channels_last && shape.size() == 1) continue;  // contiguous
        for (const auto type : {at::kDouble, at::kFloat})
          cases.push_back({shape, share, layout, type});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(all, SyncBatchNormTest, ::testing::ValuesIn(all_cases()));

class SyncBatchNormLayerTest : public testing::LayerTest {};
INSTANTIATE_TEST_SUITE_P(over, SyncBatchNormLayerTest, ::testing::ValuesIn(testing::over_each()),
                         testing::name_of);

TEST_P(SyncBatchNormLayerTest, equals_batch_norm_of_the_whole_batch) {
  for (const testing::Shares& shares :
       {testing::Shares{5, 3}, {3, 1, 4}, {2, 0, 5, 1}, {0, 1, 2, 3, 2}, {1, 2, 3, 0, 0, 1, 1}}) {
    for (const double mean : {0.5, 1e4}) {
      const LayerCase c{{6, 9, 11}, shares};
      const Batch batch = batch_of(c, mean);
      const Outcome got = run_on_ranks(c, batch, GetParam().run);
      const Outcome expected = run(torch::nn::BatchNormOptions(6), batch.input,
                                   batch.output_gradient, batch.weight, batch.bias);
      expect_equal(got, expected, mean < 1 ? 1e-12 : 1e-9);
    }
  }
}

/// One channel in long double, from the values as they are.
struct Exact {
  long double mean = 0, var = 0, unbiased = 0;
};

Exact exact_statistics(const Tensor& channel) {
  const Tensor values = channel.to(at::kDouble).contiguous().view({-1});
  const double* const x = values.data_ptr<double>();
  const auto n = values.numel();
  Exact exact;
  for (std::int64_t i = 0; i < n; ++i) exact.mean += x[i];
  exact.mean /= n;
  for (std::int64_t i = 0; i < n; ++i) exact.var += (x[i] - exact.mean) * (x[i] - exact.mean);
  exact.unbiased = exact.var / (n - 1);
  exact.var /= n;
  return exact;
}

/// Largest error of output and running statistics against long double, per channel of the batch.
struct Errors {
  long double output = 0, running_mean = 0, running_var = 0;
};

Errors errors_of(const Outcome& got, const Batch& batch) {
  Errors errors;
  const auto worse = [](long double& worst, long double a, long double b) {
    worst = std::max(worst, std::abs(a - b));
  };
  for (std::int64_t c = 0; c < batch.input.size(1); ++c) {
    const Exact exact = exact_statistics(batch.input.select(1, c));
    const Tensor x = batch.input.select(1, c).to(at::kDouble).contiguous().view({-1});
    const Tensor y = got.output.detach().select(1, c).to(at::kDouble).contiguous().view({-1});
    const long double scale =
        batch.weight[c].item<double>() / std::sqrt(exact.var + static_cast<long double>(1e-5));
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      worse(errors.output, y.data_ptr<double>()[i],
            (x.data_ptr<double>()[i] - exact.mean) * scale + batch.bias[c].item<double>());
    }
    worse(errors.running_mean, got.running_mean[c].item<double>(), exact.mean * 0.1L);
    worse(errors.running_var, got.running_var[c].item<double>(), 0.9L + exact.unbiased * 0.1L);
  }
  return errors;
}

/// With mean/std = 1e4 two correct results in f64 may differ by the rounding of the mean itself,
/// 1e4 * 2^-53 = 1e-12: so both are measured against long double, and ours may not be worse than
/// torch's, nor than one such rounding.
/// What rank 1 of 2 has of a batch that is larger than a core's cache.
struct SecondShare {
  std::int64_t n_samples;
  Layout layout;
  bool takes_all_at_once;
};

TEST(SyncBatchNormMessagesTest, chunked_channels) {
  for (const SecondShare& second :
       {SecondShare{24, Layout::contiguous, false}, SecondShare{3, Layout::contiguous, false},
        SecondShare{0, Layout::contiguous, false}, SecondShare{24, Layout::channels_last, true}}) {
    const LayerCase c{{6, 128, 128}, {24, second.n_samples}};
    const Batch batch = batch_of(c, /*mean=*/3);
    const Outcome expected = run(torch::nn::BatchNormOptions(6), batch.input, batch.output_gradient,
                                 batch.weight, batch.bias);
    std::vector<Outcome> outcomes(2);
    on_ranks(2, [&](int rank) {
      at::set_num_threads(1);
      const Tensor input = laid_out(share_of(batch.input, c.shares, rank),
                                    rank == 1 ? second.layout : Layout::contiguous);
      BatchNormRecord record;
      record.settings.layer = {default_group(), std::make_shared<std::string>("of this test"),
                               std::source_location::current()};
      record.settings.eps = 1e-5;
      batch_norm_forward(input, batch.weight, batch.bias, record);
      const bool divides =
          internal::NativeGroup::has_low_latency(default_group()) && !second.takes_all_at_once;
      EXPECT_EQ(record.channels_per_message < 6, divides);
      outcomes[static_cast<std::size_t>(rank)] =
          run(SyncBatchNormOptions(6), input, share_of(batch.output_gradient, c.shares, rank),
              batch.weight, batch.bias);
    });
    Outcome got = outcomes[0];
    got.output = at::cat({outcomes[0].output.detach(), outcomes[1].output.detach()});
    got.input_gradient = at::cat({outcomes[0].input_gradient, outcomes[1].input_gradient});
    got.weight_gradient = outcomes[0].weight_gradient + outcomes[1].weight_gradient;
    got.bias_gradient = outcomes[0].bias_gradient + outcomes[1].bias_gradient;
    expect_equal(got, expected, 1e-12);
  }
}

TEST(SyncBatchNormThreadsTest, any_number_of_threads_gives_the_same_bits) {
  const int before = at::get_num_threads();
  for (const Layout layout : {Layout::contiguous, Layout::channels_last}) {
    for (const auto type : {at::kDouble, at::kFloat}) {
      // Several parts of rows, the last one short.
      const LayerCase c{{7, 101, 97}, {13}, layout, type};
      const Batch batch = batch_of(c, /*mean=*/1);
      const Tensor input = laid_out(batch.input, layout);
      std::vector<Outcome> outcomes;
      for (const int n_threads : {1, 2, 5}) {
        at::set_num_threads(n_threads);
        outcomes.push_back(
            run(SyncBatchNormOptions(7), input, batch.output_gradient, batch.weight, batch.bias));
        const Outcome& last = outcomes.back();
        EXPECT_TRUE(last.output.equal(outcomes[0].output)) << n_threads;
        EXPECT_TRUE(last.input_gradient.equal(outcomes[0].input_gradient)) << n_threads;
        EXPECT_TRUE(last.weight_gradient.equal(outcomes[0].weight_gradient)) << n_threads;
        EXPECT_TRUE(last.bias_gradient.equal(outcomes[0].bias_gradient)) << n_threads;
        EXPECT_TRUE(last.running_var.equal(outcomes[0].running_var)) << n_threads;
      }
      at::set_num_threads(before);
      const Outcome expected = run(torch::nn::BatchNormOptions(7), batch.input,
                                   batch.output_gradient, batch.weight, batch.bias);
      expect_equal(outcomes[0], expected, type == at::kDouble ? 1e-12 : 1e-5);
    }
  }
}

TEST(SyncBatchNormPrecisionTest, mean_ten_thousand_times_the_deviation) {
  for (const auto type : {at::kDouble, at::kFloat}) {
    for (const Layout layout : {Layout::contiguous, Layout::channels_last}) {
      const LayerCase c{{6, 9, 11}, {13, 2, 1}, layout, type};
      const Batch batch = batch_of(c, /*mean=*/1e4);
      const Errors ours = errors_of(run_on_ranks(c, batch), batch);
      const Errors torchs =
          errors_of(run(torch::nn::BatchNormOptions(6), laid_out(batch.input, layout),
                        batch.output_gradient, batch.weight, batch.bias),
                    batch);
      const std::string name = std::string(c10::toString(type)) +
                               (layout == Layout::contiguous ? " contiguous" : " channels-last");
      RecordProperty(name + " ours: output, running_mean, running_var",
                     c10::str(ours.output, ' ', ours.running_mean, ' ', ours.running_var));
      RecordProperty(name + " torch: output, running_mean, running_var",
                     c10::str(torchs.output, ' ', torchs.running_mean, ' ', torchs.running_var));
      const long double rounding = type == at::kDouble ? 1e-12L : 1e-6L;
      EXPECT_LE(ours.output, std::max(torchs.output, rounding)) << name;
      EXPECT_LE(ours.output, type == at::kDouble ? 1e-12L : 1e-5L) << name;
      EXPECT_LE(ours.running_mean, type == at::kDouble ? 1e-12L : 1e-4L) << name;  // an ulp of 1e3
      EXPECT_LE(ours.running_var, type == at::kDouble ? 1e-12L : 1e-5L) << name;
    }
  }
}

TEST(SyncBatchNormPrecisionTest, gradients_at_ten_thousand_times_the_deviation) {
  for (const auto type : {at::kDouble, at::kFloat}) {
    const LayerCase c{{6, 9, 11}, {13, 2, 1}, Layout::contiguous, type};
    Batch batch = batch_of(c, /*mean=*/1e4);
    const Outcome got = run_on_ranks(c, batch);
    // Shifting the input changes no gradient: torch on the centred batch is the reference.
    batch.input = (batch.input.to(at::kDouble) - 1e4).to(type);
    const Outcome expected = run(torch::nn::BatchNormOptions(6), batch.input, batch.output_gradient,
                                 batch.weight, batch.bias);
    const double tolerance = type == at::kDouble ? 1e-11 : 1e-5;
    EXPECT_LE(difference(got.input_gradient, expected.input_gradient), tolerance);
    EXPECT_LE(difference(got.weight_gradient, expected.weight_gradient), 100 * tolerance);
    EXPECT_LE(difference(got.bias_gradient, expected.bias_gradient), 100 * tolerance);
  }
}

/// The alternative that docs/design/001-sync-batch-norm-statistics.md rejects, and its figures.
TEST(SyncBatchNormPrecisionTest, sums_of_squares_would_lose_what_the_message_keeps) {
  constexpr std::size_t kParts = 4;
  constexpr std::size_t kCount = 8192;  // values per rank: 8 images of 32 x 32
  for (const double ratio : {1.0, 1e2, 1e4, 1e6}) {
    const Tensor values = Random(11).normal({kParts, kCount}) + ratio;
    std::vector<double> counts(kParts, kCount), means(kParts), m2s(kParts);
    double sum = 0, sum_of_squares = 0, mean = 0, m2 = 0;
    for (std::size_t part = 0; part < kParts; ++part) {
      const double* const x = values.data_ptr<double>() + part * kCount;
      kernels::batch_norm_stats(x, {1, 1, kCount}, &means[part], &m2s[part]);
      for (std::size_t i = 0; i < kCount; ++i) {
        sum += x[i];
        sum_of_squares += x[i] * x[i];
      }
    }
    kernels::batch_norm_merge(kParts, counts.data(), means.data(), m2s.data(), /*stride=*/1,
                              /*channels=*/1, &mean, &m2);
    constexpr double n = kParts * kCount;
    const long double exact = exact_statistics(values).var;
    const auto error = [exact](double var) {
      return static_cast<double>(std::abs((var - exact) / exact));
    };
    const double of_message = error(m2 / n);
    const double of_sums = error(sum_of_squares / n - (sum / n) * (sum / n));
    RecordProperty(fmt::format("mean/std {:g}: relative error of the variance", ratio),
                   fmt::format("message {:.1e}, sums {:.1e}", of_message, of_sums));
    EXPECT_LE(of_message, 1e-12);
    EXPECT_GE(of_sums, ratio >= 1e4 ? 1e-10 : 0);
  }
}

TEST(SyncBatchNormModuleTest, state_is_that_of_batch_norm) {
  for (const bool affine : {true, false}) {
    for (const bool track : {true, false}) {
      const SyncBatchNorm2d ours(SyncBatchNormOptions(3).affine(affine).track_running_stats(track));
      const torch::nn::BatchNorm2d torchs(
          torch::nn::BatchNormOptions(3).affine(affine).track_running_stats(track));
      for (const auto& [got, expected] :
           {std::pair{ours->named_parameters(), torchs->named_parameters()},
            std::pair{ours->named_buffers(), torchs->named_buffers()}}) {
        ASSERT_EQ(got.keys(), expected.keys());
        for (const auto& item : expected) {
          EXPECT_EQ(got[item.key()].sizes(), item->sizes());
          EXPECT_EQ(got[item.key()].scalar_type(), item->scalar_type());
          EXPECT_TRUE(got[item.key()].equal(*item));
        }
      }
    }
  }
}

TEST(SyncBatchNormModuleTest, loads_what_batch_norm_saved_and_back) {
  torch::nn::BatchNorm2d torchs(4);
  torchs->forward(Random(1).normal({2, 4, 3, 3}, at::kFloat));
  std::stringstream there, back;
  torch::save(torchs, there);
  SyncBatchNorm2d ours(4);
  torch::load(ours, there);
  EXPECT_TRUE(ours->running_mean.equal(torchs->running_mean));
  EXPECT_EQ(ours->num_batches_tracked.item<std::int64_t>(), 1);
  ours->forward(Random(2).normal({2, 4, 3, 3}, at::kFloat));
  torch::save(ours, back);
  torch::load(torchs, back);
  EXPECT_TRUE(torchs->running_var.equal(ours->running_var));
}

// Else autograd would not notice that a number that it saved has changed.
TEST(SyncBatchNormModuleTest, counting_a_batch_changes_the_version_of_the_count) {
  SyncBatchNorm2d bn(4);
  const auto before = bn->num_batches_tracked._version();
  bn->forward(Random(1).normal({2, 4, 3, 3}, at::kFloat));
  EXPECT_GT(bn->num_batches_tracked._version(), before);
}

TEST_P(SyncBatchNormLayerTest, several_batches_with_and_without_momentum) {
  for (const std::optional<double> momentum : {std::optional(0.3), std::optional<double>()}) {
    on(3, [&](int rank) {
      Random random(7);
      SyncBatchNorm1d ours(SyncBatchNormOptions(3).momentum(momentum));
      auto options = torch::nn::BatchNormOptions(3);
      options.momentum().reset();
      if (momentum) options.momentum() = *momentum;
      torch::nn::BatchNorm1d torchs(options);
      ours->to(at::kDouble);
      torchs->to(at::kDouble);
      const testing::Shares shares{4, 1, 2};
      for (int step = 0; step < 5; ++step) {
        const Tensor batch = random.normal({7, 3}) * (step + 1);
        ours->forward(share_of(batch, shares, rank));
        torchs->forward(batch);
        EXPECT_LE(difference(ours->running_mean, torchs->running_mean), 1e-12);
        EXPECT_LE(difference(ours->running_var, torchs->running_var), 1e-12);
        EXPECT_EQ(ours->num_batches_tracked.item<std::int64_t>(), step + 1);
      }
    });
  }
}

TEST(SyncBatchNormModuleTest, eps_is_that_of_the_options) {
  on_ranks(2, [](int rank) {
    const Tensor batch = Random(8).normal({6, 3, 4}) * 0.1;
    const testing::Shares shares{4, 2};
    for (const double eps : {0.0, 1e-3, 0.5}) {
      torch::nn::BatchNorm1d whole(torch::nn::BatchNormOptions(3).eps(eps));
      SyncBatchNorm1d bn(SyncBatchNormOptions(3).eps(eps));
      whole->to(at::kDouble);
      bn->to(at::kDouble);
      const Tensor x = batch.detach().clone().requires_grad_();
      const Tensor mine = share_of(batch, shares, rank).clone().requires_grad_();
      const Tensor expected = whole(x), got = bn(mine);
      expected.square().sum().backward();
      got.square().sum().backward();
      EXPECT_LE(difference(got, share_of(expected, shares, rank)), 1e-12) << eps;
      EXPECT_LE(difference(mine.grad(), share_of(x.grad(), shares, rank)), 1e-11) << eps;
      whole->eval();
      bn->eval();
      EXPECT_LE(difference(bn(mine), share_of(whole(x), shares, rank)), 1e-12) << eps;
    }
  });
}

TEST(SyncBatchNormModuleTest, eval_uses_running_statistics_and_sends_nothing) {
  on_ranks(2, [](int rank) {
    Random random(3);
    SyncBatchNorm2d bn(3);
    torch::nn::BatchNorm2d reference(3);
    bn->forward(random.normal({2, 3, 4, 4}, at::kFloat));
    bn->eval();
    reference->eval();
    reference->running_mean.copy_(bn->running_mean);
    reference->running_var.copy_(bn->running_var);
    const Tensor x = random.normal({2, 3, 4, 4}, at::kFloat);
    if (rank == 0) {  // rank 1 is away
      EXPECT_TRUE(bn->forward(x).equal(reference->forward(x)));
    }
    EXPECT_EQ(bn->num_batches_tracked.item<std::int64_t>(), 1);
  });
}

TEST(SyncBatchNormModuleTest, synchronises_without_gradients_and_twice_per_forward) {
  on_ranks(2, [](int rank) {
    Random random(4);
    SyncBatchNorm1d bn(SyncBatchNormOptions(2));
    torch::nn::BatchNorm1d reference(2);
    bn->to(at::kDouble);
    reference->to(at::kDouble);
    const Tensor a = random.normal({6, 2}), b = random.normal({6, 2});
    {
      const at::NoGradGuard no_grad;
      const Tensor whole = reference->forward(reference->forward(a) + b);
      const auto part = [&](const Tensor& t) { return t.narrow(0, 3 * rank, 3); };
      const Tensor got = bn->forward(bn->forward(part(a)) + part(b));
      EXPECT_LE(difference(got, part(whole)), 1e-12);
      EXPECT_FALSE(got.requires_grad());
    }
    EXPECT_LE(difference(bn->running_var, reference->running_var), 1e-12);
  });
}

TEST(SyncBatchNormModuleTest, gradients_where_only_some_are_wanted) {
  on_ranks(2, [](int rank) {
    Random random(5);
    const Tensor all = random.normal({6, 3}), gradient = random.normal({6, 3});
    const auto part = [&](const Tensor& t) { return t.narrow(0, 3 * rank, 3); };
    for (const bool input_wanted : {true, false}) {
      for (const bool weight_wanted : {true, false}) {
        if (!input_wanted && !weight_wanted) continue;
        SyncBatchNorm1d bn(3);
        bn->to(at::kDouble);
        bn->weight.requires_grad_(weight_wanted);
        bn->bias.requires_grad_(false);
        const Tensor x = part(all).detach().clone();
        x.requires_grad_(input_wanted);
        bn->forward(x).backward(part(gradient));
        EXPECT_EQ(x.grad().defined(), input_wanted);
        EXPECT_EQ(bn->weight.grad().defined(), weight_wanted);
        EXPECT_FALSE(bn->bias.grad().defined());
      }
    }
    SyncBatchNorm1d plain(SyncBatchNormOptions(3).affine(false).track_running_stats(false));
    const Tensor x = part(all).detach().to(at::kFloat).requires_grad_();
    plain->forward(x).sum().backward();
    EXPECT_LE(testing::largest(x.grad()), 1e-5);
  });
}

TEST_P(SyncBatchNormLayerTest, a_rank_without_samples_takes_part) {
  on(2, [](int rank) {
    Random random(6);
    SyncBatchNorm2d bn(3);
    const Tensor x = random.normal({rank == 0 ? 4 : 0, 3, 2, 2}, at::kFloat).requires_grad_();
    const Tensor y = bn->forward(x);
    EXPECT_EQ(y.sizes(), x.sizes());
    (y * y).sum().backward();
    EXPECT_EQ(x.grad().sizes(), x.sizes());
    EXPECT_EQ(testing::largest(bn->weight.grad()) == 0, rank == 1);
  });
}

/// As a head without regions has.
TEST_P(SyncBatchNormLayerTest, no_sample_at_all_changes_nothing) {
  for (const auto eps_mode : {EpsMode::plus, EpsMode::clamp}) {
    on(3, [eps_mode](int) {
      SyncBatchNorm1d bn(SyncBatchNormOptions(3).eps_mode(eps_mode));
      const Tensor x = at::empty({0, 3}).requires_grad_();
      const Tensor y = bn->forward(x);
      EXPECT_EQ(y.sizes(), x.sizes());
      y.sum().backward();
      EXPECT_TRUE(bn->weight.grad().eq(0).all().item<bool>()) << bn->weight.grad();
      EXPECT_TRUE(bn->bias.grad().eq(0).all().item<bool>()) << bn->bias.grad();
      EXPECT_EQ(x.grad().sizes(), x.sizes());
      EXPECT_EQ(testing::largest(bn->running_mean), 0);
      EXPECT_TRUE(bn->running_var.eq(1).all().item<bool>());
      EXPECT_EQ(bn->n_nonfinite_batches(), 0);
    });
  }
}

std::string layer_mismatch(const std::function<void()>& forward) {
  try {
    forward();
  } catch (const MismatchError& error) {
    return error.what();
  }
  return "no error";
}

/// Two layers of one width: one rank would take the statistics of the other layer.
TEST(SyncBatchNormModuleTest, layers_in_another_order_on_one_rank) {
  using test::Form;
  for (const Form form : {Form::threads, Form::processes, Form::hosts, Form::gloo}) {
    SCOPED_TRACE(test::name_of({form, 3}));
    test::run_as({form, 3}, [] {
      const bool is_other = get_rank() == 1;
      SyncBatchNorm1d first(3);
      SyncBatchNorm1d second(3);
      const std::string text = layer_mismatch([&] {
        (is_other ? second : first)->forward(at::ones({2, 3}));
      });
      EXPECT_NE(text.find("forward of SyncBatchNorm1d(3)"), std::string::npos) << text;
      EXPECT_NE(text.find(", layer "), std::string::npos) << text;
    });
    test::run_as({form, 3}, [] {
      const std::string other = get_rank() == 1 ? "1" : "0";
      torch::nn::Sequential net(torch::nn::BatchNorm1d(3), torch::nn::BatchNorm1d(3));
      convert_sync_batchnorm(net);
      const Tensor x = at::ones({2, 3}).requires_grad_();
      const Tensor y = net->forward(x);
      const std::string text =
          layer_mismatch([&] { net->named_children()[other]->as<SyncBatchNorm1d>()->forward(x); });
      EXPECT_NE(text.find("forward of SyncBatchNorm1d '" + other + "'"), std::string::npos) << text;
      EXPECT_NE(text.find(", layer "), std::string::npos) << text;
    });
  }
}

/// The order of backward is the graph's, which need not be that of forward.
TEST_P(SyncBatchNormLayerTest, backwards_in_another_order_on_one_rank) {
  on(2, [](int rank) {
    SyncBatchNorm1d first(3);
    SyncBatchNorm1d second(3);
    const Tensor x = at::ones({2, 3}).requires_grad_();
    const Tensor y = first->forward(x), z = second->forward(x);
    const std::string text = layer_mismatch([&] { (rank == 0 ? y : z).sum().backward(); });
    EXPECT_NE(text.find("backward of SyncBatchNorm1d(3)"), std::string::npos) << text;
    EXPECT_NE(text.find(", layer "), std::string::npos) << text;
  });
}

/// Copies of a layer, and the same layer used twice, are no other layers.
TEST_P(SyncBatchNormLayerTest, a_layer_and_its_copies_are_one) {
  on(2, [](int rank) {
    SyncBatchNorm1d bn(3);
    const auto copy = std::dynamic_pointer_cast<SyncBatchNorm1dImpl>(bn->clone());
    (rank == 0 ? bn.ptr() : copy)->forward(at::ones({2, 3}));
    bn->forward(at::ones({2, 3}));
  });
}

TEST_P(SyncBatchNormLayerTest, one_value_per_channel_over_all_ranks) {
  for (const int n_ranks : {1, 3}) {
    on(n_ranks, [](int rank) {
      SyncBatchNorm1d bn(3);
      const Tensor x = at::ones({rank == 0 ? 1 : 0, 3});
      try {
        bn->forward(x);
        ADD_FAILURE() << "no error";
      } catch (const UsageError& error) {
        EXPECT_EQ(error.text(), c10::str("Expected more than 1 value per channel when training, "
                                         "got input size ",
                                         x.sizes()));
      }
      EXPECT_EQ(bn->num_batches_tracked.item<std::int64_t>(), 0);
      EXPECT_EQ(testing::largest(bn->running_mean), 0);
      bn->forward(at::ones({2, 3}));  // the group still works
    });
  }
}

/// Between forward and backward: the all_reduce of backward is called from a node of autograd.
TEST(SyncBatchNormModuleTest, a_peers_exception_reaches_backward) {
  std::string text;
  const auto body = [&](int rank) {
    SyncBatchNorm1d bn(3);
    const Tensor y = bn->forward(at::ones({2, 3}).set_requires_grad(true));
    if (rank == 1) throw std::out_of_range("no label");
    try {
      y.sum().backward();
      ADD_FAILURE() << "no error";
    } catch (const PeerFailed& error) {
      text = error.what();
    }
  };
  EXPECT_THROW(on_ranks(2, body), std::out_of_range);
  EXPECT_NE(text.find("rank 1 failed: no label"), std::string::npos) << text;
}

TEST_P(SyncBatchNormLayerTest, a_peer_in_another_call_is_reported_by_backward) {
  on(2, [](int rank) {
    SyncBatchNorm1d bn(3);
    const Tensor y = bn->forward(at::ones({2, 3}).set_requires_grad(true));
    if (rank == 1) {
      EXPECT_THROW(default_group().barrier(), MismatchError);
    } else {
      EXPECT_THROW(y.sum().backward(), MismatchError);
    }
  });
}

TEST_P(SyncBatchNormLayerTest, wrong_input_is_rejected_before_anything_is_sent) {
  on(2, [](int /*rank*/) {
    SyncBatchNorm2d bn(3);
    EXPECT_EQ(usage_error([&] {
                bn->forward(at::ones({2, 3, 4}));
              }),
              "expected 4D input, got 3D input");
    EXPECT_EQ(usage_error([&] {
                bn->forward(at::ones({2, 4, 1, 1}));
              }),
              "expected 3 channels, got input size [2, 4, 1, 1]");
    EXPECT_NE(usage_error([&] {
                bn->forward(at::ones({2, 3, 1, 1}, at::kInt));
              }).find("expected input of float64, float32, bfloat16 or float16, got Int"),
              std::string::npos);
    EXPECT_NE(usage_error([&] {
                bn->forward(at::ones({2, 3, 1, 1}, at::kDouble));
              }).find("expected weight to be a Double tensor of"),
              std::string::npos);
    EXPECT_EQ(usage_error([&] { SyncBatchNorm1d(3)->forward(at::ones({2})); }),
              "expected 2D or 3D input, got 1D input");
    EXPECT_EQ(usage_error([&] {
                SyncBatchNorm3d(3)->forward(at::ones({2, 3, 1, 1}));
              }),
              "expected 5D input, got 4D input");
    bn->forward(at::ones({1, 3, 2, 2}));
  });
}

TEST(SyncBatchNormModuleTest, from_one_to_4096_channels) {
  for (const std::int64_t channels : {1, 2, 3, 17, 255, 1024, 4096}) {
    const LayerCase c{{channels, 3}, {3, 1}, Layout::contiguous, at::kDouble};
    const Batch batch = batch_of(c, /*mean=*/0.5);
    const Outcome expected = run(torch::nn::BatchNormOptions(channels), batch.input,
                                 batch.output_gradient, batch.weight, batch.bias);
    expect_equal(run_on_ranks(c, batch), expected, 1e-12);
  }
}

TEST(SyncBatchNormModuleTest, half_precision_keeps_type_and_layout) {
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    for (const auto state : {at::kFloat, type}) {
      on_ranks(2, [&](int rank) {
        SyncBatchNorm2d bn(3);
        bn->to(state);
        const Tensor x = laid_out(Random(5).normal({4, 3, 3, 3}, type), Layout::channels_last)
                             .narrow(0, 2 * rank, 2)
                             .detach()
                             .requires_grad_();
        const Tensor y = bn->forward(x);
        EXPECT_EQ(y.scalar_type(), type);
        EXPECT_TRUE(testing::is_channels_last(y));
        (y * y * y).sum().backward();
        EXPECT_EQ(x.grad().scalar_type(), type);
        EXPECT_TRUE(testing::is_channels_last(x.grad()));
        EXPECT_EQ(bn->weight.grad().scalar_type(), state);
        EXPECT_EQ(bn->running_mean.scalar_type(), state);
      });
    }
  }
}

TEST_P(SyncBatchNormLayerTest, what_a_batch_with_a_nan_does) {
  for (const auto on_nonfinite : {OnNonfinite::propagate, OnNonfinite::keep_running_stats}) {
    for (const std::optional<double> momentum : {std::optional(0.1), std::optional<double>()}) {
      const bool keeps = on_nonfinite == OnNonfinite::keep_running_stats;
      on(3, [&](int rank) {
        SyncBatchNorm1d bn(SyncBatchNormOptions(3).on_nonfinite(on_nonfinite).momentum(momentum));
        bn->forward(Random(1).normal({2, 3}, at::kFloat));
        const Tensor mean = bn->running_mean.clone(), var = bn->running_var.clone();
        EXPECT_EQ(bn->n_nonfinite_batches(), 0);
        int n_batches = 1;
        for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
          Tensor x = Random(2).normal({2, 3}, at::kFloat);
          if (rank == 1) x[1][2] = bad;
          const Tensor y = bn->forward(x);
          ++n_batches;
          EXPECT_FALSE(y.isfinite().all().item<bool>()) << "on every rank";
          EXPECT_TRUE(y.select(1, 0).isfinite().all().item<bool>()) << "a channel without";
          EXPECT_EQ(bn->n_nonfinite_batches(), n_batches - 1);
          EXPECT_EQ(bn->running_mean.equal(mean), keeps);
          EXPECT_EQ(bn->running_var.equal(var), keeps);
          EXPECT_EQ(bn->num_batches_tracked.item<std::int64_t>(), keeps ? 1 : n_batches);
        }
        bn->forward(at::empty({0, 3}));  // no value is no NaN
        EXPECT_EQ(bn->n_nonfinite_batches(), 3);
      });
    }
  }
}

/// Finite values, with a variance that running_var cannot hold.
TEST_P(SyncBatchNormLayerTest, what_a_variance_that_overflows_does) {
  for (const auto type : {at::kFloat, at::kDouble}) {
    for (const auto on_nonfinite : {OnNonfinite::propagate, OnNonfinite::keep_running_stats}) {
      const bool keeps = on_nonfinite == OnNonfinite::keep_running_stats;
      on(2, [&](int rank) {
        SyncBatchNorm1d bn(SyncBatchNormOptions(2).on_nonfinite(on_nonfinite));
        bn->to(type);
        const double large = type == at::kFloat ? 1e30 : 1e200;
        Tensor x = Random(3).normal({2, 2}, type);
        x[0][1] = rank == 0 ? large : -large;
        bn->forward(x);
        EXPECT_EQ(bn->running_var.isfinite().all().item<bool>(), keeps) << bn->running_var;
        EXPECT_EQ(bn->n_nonfinite_batches(), 1);
        EXPECT_EQ(bn->num_batches_tracked.item<std::int64_t>(), keeps ? 0 : 1);
      });
    }
  }
}

TEST(SyncBatchNormModuleTest, clones_and_prints) {
  SyncBatchNorm2d bn(SyncBatchNormOptions(3).momentum(std::nullopt));
  bn->forward(Random(9).normal({2, 3, 2, 2}, at::kFloat));
  const auto copy = std::dynamic_pointer_cast<SyncBatchNorm2dImpl>(bn->clone());
  ASSERT_TRUE(copy);
  EXPECT_TRUE(copy->running_mean.equal(bn->running_mean));
  EXPECT_FALSE(copy->running_mean.is_same(bn->running_mean));
  EXPECT_EQ(copy->options.group(), bn->options.group());
  std::stringstream text;
  text << *bn;
  EXPECT_NE(text.str().find("SyncBatchNorm2d(3, eps=1e-05, momentum=none, affine=true"),
            std::string::npos)
      << text.str();
}

}  // namespace
}  // namespace lockstep::nn
