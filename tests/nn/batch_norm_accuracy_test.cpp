#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/nn.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "helpers.hpp"

/// The table of docs/performance.md: largest errors of the output against long double, of ours and
/// of libtorch's layer, as properties (nn_tests --gtest_filter=BatchNormAccuracyTest.*
/// --gtest_output=xml).
namespace lockstep::nn::batch_norm_accuracy_test {
namespace {

using at::Tensor;

constexpr double kEps = 1e-5;

/// Largest error of y, a normalisation of x without weight and bias.
double error_of(const Tensor& y, const Tensor& x) {
  long double worst = 0;
  for (std::int64_t c = 0; c < x.size(1); ++c) {
    const Tensor in = x.select(1, c).to(at::kDouble).contiguous().view({-1});
    const Tensor out = y.select(1, c).to(at::kDouble).contiguous().view({-1});
    const double* const values = in.data_ptr<double>();
    const double* const results = out.data_ptr<double>();
    const auto n = in.numel();
    long double mean = 0;
    long double var = 0;
    for (std::int64_t i = 0; i < n; ++i) mean += values[i];
    mean /= static_cast<long double>(n);
    for (std::int64_t i = 0; i < n; ++i) var += (values[i] - mean) * (values[i] - mean);
    var /= static_cast<long double>(n);
    const long double scale = 1 / std::sqrt(var + static_cast<long double>(kEps));
    for (std::int64_t i = 0; i < n; ++i) {
      worst = std::max(worst, std::abs(results[i] - (values[i] - mean) * scale));
    }
  }
  return static_cast<double>(worst);
}

std::string libtorchs_error(const Tensor& x) {
  try {
    const Tensor y = at::batch_norm(x, {}, {}, {}, {}, /*training=*/true, /*momentum=*/0.1, kEps,
                                    /*cudnn_enabled=*/false);
    return fmt::format("{:.1e}", error_of(y, x));
  } catch (const c10::Error&) {
    return "not supported";
  }
}

class BatchNormAccuracyTest : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(BatchNormAccuracyTest, output_at_any_mean) {
  const at::ScalarType type = GetParam();
  // The deviation keeps the largest mean within f16's range.
  const double deviation = type == at::kHalf ? 1.0 / 256 : 1;
  const double spacing = type == at::kHalf       ? std::ldexp(1, -10)
                         : type == at::kBFloat16 ? std::ldexp(1, -7)
                                                 : 0;
  for (const double ratio : {0.0, 1e2, 1e4, 1e6}) {
    const Tensor values =
        ((testing::Random(3).normal({8, 4, 40, 40}) + ratio) * deviation).to(type);
    for (const bool channels_last : {false, true}) {
      const Tensor x = channels_last ? testing::channels_last(values) : values;
      SyncBatchNorm2d bn(SyncBatchNormOptions(4).eps(kEps).affine(false));
      const Tensor y = bn->forward(x);
      const double ours = error_of(y, x);
      RecordProperty(fmt::format("{} {} mean/std {:g}", c10::toString(type),
                                 channels_last ? "channels-last" : "contiguous", ratio),
                     fmt::format("ours {:.1e}, libtorch {}", ours, libtorchs_error(x)));
      // A 16-bit output is rounded once.
      EXPECT_LE(ours, 1e-5 + spacing / 2 * testing::largest(y.to(at::kDouble))) << ratio;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, BatchNormAccuracyTest,
                         ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& tested) {
                           return std::string(c10::toString(tested.param));
                         });

}  // namespace
}  // namespace lockstep::nn::batch_norm_accuracy_test
