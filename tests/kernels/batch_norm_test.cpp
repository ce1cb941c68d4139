#include "kernels/batch_norm.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include <fmt/format.h>

#include "kernels/batch_norm_isa.hpp"
#include "kernels/isas.hpp"

namespace lockstep::kernels {
namespace {

using Wide = long double;

std::string describe(BatchNormShape s) {
  return fmt::format("x[{}][{}][{}]", s.outer, s.channels, s.inner);
}

std::size_t n_values(BatchNormShape s) { return s.outer * s.channels * s.inner; }

/// Both traversals, whole registers and remainders, combined rows with and without a remainder,
/// several tiles, more than kWidth channels in runs.
std::vector<BatchNormShape> shapes() {
  std::vector<BatchNormShape> all = {
      {1, 1, 1},     {2, 3, 5},    {1, 1, 5000}, {3, 2, 16},   {3, 2, 17},  {3, 2, 31},
      {3, 2, 32},    {3, 2, 33},   {5, 3, 63},   {2, 520, 33}, {7, 3, 49},  {2, 2, 4096},
      {2, 1, 10000}, {2, 3, 4097}, {40, 5, 7},   {9, 33, 15},  {3, 100, 9}, {2, 1030, 2},
      {1000, 2, 1},  {300, 1, 1},  {1, 4096, 1}, {5, 4096, 1}};
  for (const std::size_t channels : {1, 2, 3, 5, 8, 10, 16, 31, 33, 64, 127, 128, 511, 512, 513}) {
    all.push_back({263, channels, 1});
  }
  return all;
}

template <class T>
std::vector<T> random_values(std::size_t n, double mean, double std, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(mean, std);
  std::vector<T> values(n);
  for (T& x : values) x = static_cast<T>(normal(random));
  return values;
}

/// Values of one channel.
template <class T>
std::vector<T> channel_of(const std::vector<T>& x, BatchNormShape s, std::size_t channel) {
  std::vector<T> values;
  for (std::size_t n = 0; n < s.outer; ++n) {
    for (std::size_t i = 0; i < s.inner; ++i) {
      values.push_back(x[(n * s.channels + channel) * s.inner + i]);
    }
  }
  return values;
}

struct WideStats {
  Wide mean = 0;
  Wide m2 = 0;
};

template <class T>
WideStats wide_stats(const std::vector<T>& values) {
  WideStats stats;
  for (const T x : values) stats.mean += x;
  if (!values.empty()) stats.mean /= static_cast<Wide>(values.size());
  for (const T x : values) stats.m2 += (x - stats.mean) * (x - stats.mean);
  return stats;
}

struct Stats {
  std::vector<double> mean;
  std::vector<double> m2;
};

template <class T>
Stats stats_with(Isa isa, const std::vector<T>& x, BatchNormShape s) {
  Stats stats{std::vector<double>(s.channels, -1), std::vector<double>(s.channels, -1)};
  batch_norm_table<T>(isa).stats(x.data(), s, stats.mean.data(), stats.m2.data());
  return stats;
}

template <class T>
void expect_same_bits(const std::vector<T>& a, const std::vector<T>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  if (a.empty()) return;
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(T)), 0) << what;
}

double ulp_of(double x) {
  return std::nextafter(std::abs(x), std::numeric_limits<double>::infinity()) - std::abs(x);
}

template <class T>
class BatchNormTest : public testing::Test {
 protected:
  static constexpr double kEpsilon = std::numeric_limits<T>::epsilon();
  /// What sums in blocks of T cost, relative to the sum of the magnitudes.
  static constexpr double kSumError = std::is_same_v<T, float> ? 1e-6 : 1e-15;

  static void check_stats(const std::vector<T>& x, BatchNormShape s, double m2_tolerance) {
    const Stats scalar = stats_with(Isa::scalar, x, s);
    for (std::size_t c = 0; c < s.channels; ++c) {
      const WideStats want = wide_stats(channel_of(x, s, c));
      const auto n = static_cast<Wide>(s.n_per_channel());
      // Rounding once costs half an ulp; the sum of the deviations, some of theirs.
      const double slack = 0.51 * ulp_of(static_cast<double>(want.mean)) +
                           kSumError * static_cast<double>(std::sqrt(want.m2 / n));
      EXPECT_NEAR(static_cast<double>(scalar.mean[c] - want.mean), 0, slack)
          << describe(s) << " channel " << c;
      EXPECT_NEAR(scalar.m2[c], static_cast<double>(want.m2),
                  (m2_tolerance + 2 * kSumError) * static_cast<double>(want.m2))
          << describe(s) << " channel " << c;
    }
    for (const Isa isa : supported_isas()) {
      const Stats other = stats_with(isa, x, s);
      expect_same_bits(other.mean, scalar.mean, describe(s) + std::string(name_of(isa)));
      expect_same_bits(other.m2, scalar.m2, describe(s) + std::string(name_of(isa)));
    }
  }
};

using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(BatchNormTest, Types);

TYPED_TEST(BatchNormTest, stats_equal_long_double) {
  for (const BatchNormShape s : shapes()) {
    this->check_stats(random_values<TypeParam>(n_values(s), 0.3, 2, 1), s, 1e-14);
  }
}

TYPED_TEST(BatchNormTest, stats_keep_a_small_spread_about_a_large_mean) {
  for (const BatchNormShape s : shapes()) {
    this->check_stats(random_values<TypeParam>(n_values(s), 1e4, 1, 2), s, 1e-13);
    this->check_stats(random_values<TypeParam>(n_values(s), -1e6, 1, 2), s, 1e-13);
  }
}

TYPED_TEST(BatchNormTest, stats_survive_a_first_value_far_from_the_rest) {
  for (const BatchNormShape s : {BatchNormShape{8, 2, 5000}, BatchNormShape{20000, 3, 1}}) {
    auto x = random_values<TypeParam>(n_values(s), 1e4, 1, 3);
    for (std::size_t c = 0; c < s.channels; ++c) x[c * s.inner] = 0;
    const Stats got = stats_with(Isa::scalar, x, s);
    for (std::size_t c = 0; c < s.channels; ++c) {
      const WideStats want = wide_stats(channel_of(x, s, c));
      EXPECT_NEAR(got.mean[c] / static_cast<double>(want.mean), 1, 1e-14 + this->kSumError);
      EXPECT_NEAR(got.m2[c] / static_cast<double>(want.m2), 1, 1e-12 + 2 * this->kSumError);
    }
  }
}

TYPED_TEST(BatchNormTest, stats_follow_a_drifting_mean) {
  for (const BatchNormShape s : {BatchNormShape{64, 2, 500}, BatchNormShape{20000, 3, 1}}) {
    auto x = random_values<TypeParam>(n_values(s), 0, 1, 4);
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] += static_cast<TypeParam>(1e4 + 100.0 * static_cast<double>(i) /
                                               static_cast<double>(x.size()));
    }
    this->check_stats(x, s, 1e-13);
  }
}

TYPED_TEST(BatchNormTest, constant_channels_have_no_spread) {
  for (const BatchNormShape s : shapes()) {
    std::vector<TypeParam> x(n_values(s));
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = TypeParam(0.1) + static_cast<TypeParam>(i / s.inner % s.channels);
    }
    for (const Isa isa : supported_isas()) {
      const Stats got = stats_with(isa, x, s);
      for (std::size_t c = 0; c < s.channels; ++c) {
        EXPECT_EQ(got.mean[c], static_cast<double>(x[c * s.inner]));
        EXPECT_EQ(got.m2[c], 0);
      }
    }
  }
}

TYPED_TEST(BatchNormTest, no_values_give_zeros_and_touch_nothing) {
  for (const BatchNormShape s : {BatchNormShape{0, 3, 5}, BatchNormShape{4, 3, 0},
                                 BatchNormShape{0, 3, 1}, BatchNormShape{2, 0, 4}}) {
    std::vector<double> mean(s.channels, 7);
    std::vector<double> m2(s.channels, 7);
    batch_norm_stats<TypeParam>(nullptr, s, mean.data(), m2.data());
    EXPECT_EQ(mean, std::vector<double>(s.channels, 0));
    EXPECT_EQ(m2, std::vector<double>(s.channels, 0));
    std::vector<double> first(s.channels, 7);
    std::vector<double> second(s.channels, 7);
    batch_norm_backward_reduce<TypeParam>(nullptr, nullptr, s, mean.data(), first.data(),
                                          second.data());
    EXPECT_EQ(first, std::vector<double>(s.channels, 0));
    EXPECT_EQ(second, std::vector<double>(s.channels, 0));
    batch_norm_normalize<TypeParam>(nullptr, s, mean.data(), m2.data(), nullptr, nullptr, nullptr);
    batch_norm_backward_elementwise<TypeParam>(nullptr, nullptr, s, mean.data(), m2.data(), nullptr,
                                               mean.data(), m2.data(), nullptr);
  }
}

TYPED_TEST(BatchNormTest, not_finite_values_stay_in_their_channel) {
  using Limits = std::numeric_limits<TypeParam>;
  for (const BatchNormShape s : {BatchNormShape{2, 3, 100}, BatchNormShape{2, 3, 5},
                                 BatchNormShape{300, 3, 1}, BatchNormShape{30, 600, 1}}) {
    const auto tame = random_values<TypeParam>(n_values(s), 1, 1, 5);
    for (const TypeParam wild : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()}) {
      for (const std::size_t n : {std::size_t{0}, s.outer - 1}) {
        auto x = tame;
        x[(n * s.channels + 1) * s.inner + (n == 0 ? 0 : s.inner - 1)] = wild;
        for (const Isa isa : supported_isas()) {
          const Stats want = stats_with(isa, tame, s);
          const Stats got = stats_with(isa, x, s);
          for (std::size_t c = 0; c < s.channels; ++c) {
            if (c == 1) {
              EXPECT_FALSE(std::isfinite(got.mean[c])) << describe(s);
              EXPECT_TRUE(std::isnan(got.m2[c])) << describe(s);
            } else {
              EXPECT_EQ(got.mean[c], want.mean[c]) << describe(s);
              EXPECT_EQ(got.m2[c], want.m2[c]) << describe(s);
            }
          }
        }
      }
    }
  }
}

TYPED_TEST(BatchNormTest, merged_parts_equal_the_whole) {
  constexpr std::size_t kChannels = 37;
  constexpr std::size_t kStride = 40;
  const std::vector<std::size_t> counts = {0, 5, 1, 300, 0, 2, 1, 64};
  const BatchNormShape whole{373, kChannels, 1};
  for (const double centre : {0.0, 1e4}) {
    const auto x = random_values<TypeParam>(n_values(whole), centre, 1, 6);
    std::vector<double> count;
    std::vector<double> mean(counts.size() * kStride, std::numeric_limits<double>::quiet_NaN());
    std::vector<double> m2 = mean;
    std::size_t row = 0;
    for (std::size_t p = 0; p < counts.size(); ++p) {
      count.push_back(static_cast<double>(counts[p]));
      if (counts[p] > 0) {  // what a part of count 0 holds does not matter
        batch_norm_stats(x.data() + row * kChannels, {counts[p], kChannels, 1},
                         mean.data() + p * kStride, m2.data() + p * kStride);
      }
      row += counts[p];
    }
    ASSERT_EQ(row, whole.outer);
    std::vector<double> out_mean(kChannels);
    std::vector<double> out_m2(kChannels);
    batch_norm_merge(static_cast<int>(counts.size()), count.data(), mean.data(), m2.data(), kStride,
                     kChannels, out_mean.data(), out_m2.data());
    for (std::size_t c = 0; c < kChannels; ++c) {
      const WideStats want = wide_stats(channel_of(x, whole, c));
      EXPECT_NEAR(out_mean[c], static_cast<double>(want.mean),
                  1.5 * ulp_of(centre + 1) + this->kSumError);  // the parts' means are rounded too
      EXPECT_NEAR(out_m2[c] / static_cast<double>(want.m2), 1,
                  (centre == 0 ? 1e-14 : 1e-12) + 2 * this->kSumError);
    }
  }
}

TEST(BatchNormMergeTest, nothing_but_empty_parts_gives_zeros) {
  const double count[] = {0, 0};
  const double parts[] = {1, 2, 3, 4};
  double mean[] = {9, 9};
  double m2[] = {9, 9};
  batch_norm_merge(2, count, parts, parts, 2, 2, mean, m2);
  EXPECT_EQ(mean[0], 0);
  EXPECT_EQ(mean[1], 0);
  EXPECT_EQ(m2[0], 0);
  EXPECT_EQ(m2[1], 0);
}

/// Everything a normalisation takes, per channel.
template <class T>
struct Parameters {
  std::vector<double> mean, invstd, mean_dy, mean_dy_xmu;
  std::vector<T> weight, bias;
};

template <class T>
Parameters<T> random_parameters(std::size_t channels, double mean) {
  Parameters<T> p;
  p.mean = random_values<double>(channels, mean, 1, 7);
  p.invstd = random_values<double>(channels, 1, 0.1, 8);
  p.mean_dy = random_values<double>(channels, 0, 1, 9);
  p.mean_dy_xmu = random_values<double>(channels, 0, 1, 10);
  p.weight = random_values<T>(channels, 1, 1, 11);
  p.bias = random_values<T>(channels, 0, 1, 12);
  return p;
}

TYPED_TEST(BatchNormTest, normalize_equals_long_double) {
  for (const BatchNormShape s : shapes()) {
    for (const double mean : {0.5, 1e4}) {
      const auto x = random_values<TypeParam>(n_values(s), mean, 1, 13);
      const auto p = random_parameters<TypeParam>(s.channels, mean);
      for (const bool affine : {true, false}) {
        const TypeParam* weight = affine ? p.weight.data() : nullptr;
        const TypeParam* bias = affine ? p.bias.data() : nullptr;
        std::vector<TypeParam> y(x.size());
        batch_norm_table<TypeParam>(Isa::scalar)
            .normalize(x.data(), s, p.mean.data(), p.invstd.data(), weight, bias, y.data(),
                       Stores::cached);
        for (std::size_t i = 0; i < x.size(); ++i) {
          const std::size_t c = i / s.inner % s.channels;
          const Wide scaled = (x[i] - static_cast<Wide>(p.mean[c])) * p.invstd[c] *
                              (affine ? static_cast<Wide>(weight[c]) : 1);
          const Wide shift = affine ? static_cast<Wide>(bias[c]) : 0;
          ASSERT_NEAR(static_cast<double>(y[i] - (scaled + shift)), 0,
                      this->kEpsilon * (3 * std::abs(static_cast<double>(scaled)) +
                                        std::abs(static_cast<double>(shift))))
              << describe(s) << " element " << i;
        }
        for (const Isa isa : supported_isas()) {
          auto in_place = x;
          batch_norm_table<TypeParam>(isa).normalize(in_place.data(), s, p.mean.data(),
                                                     p.invstd.data(), weight, bias, in_place.data(),
                                                     Stores::cached);
          expect_same_bits(in_place, y, describe(s) + std::string(name_of(isa)));
        }
      }
    }
  }
}

TYPED_TEST(BatchNormTest, backward_reduce_equals_long_double) {
  for (const BatchNormShape s : shapes()) {
    for (const double mean : {0.5, 1e4}) {
      const auto x = random_values<TypeParam>(n_values(s), mean, 1, 14);
      const auto dy = random_values<TypeParam>(n_values(s), 0.1, 1, 15);
      const auto p = random_parameters<TypeParam>(s.channels, mean);
      std::vector<double> sum_dy(s.channels);
      std::vector<double> sum_dy_xmu(s.channels);
      batch_norm_table<TypeParam>(Isa::scalar)
          .backward_reduce(dy.data(), x.data(), s, p.mean.data(), sum_dy.data(), sum_dy_xmu.data());
      for (std::size_t c = 0; c < s.channels; ++c) {
        const auto channel_x = channel_of(x, s, c);
        const auto channel_dy = channel_of(dy, s, c);
        Wide want[2] = {0, 0};
        Wide size[2] = {0, 0};
        for (std::size_t i = 0; i < channel_x.size(); ++i) {
          const Wide product = channel_dy[i] * (channel_x[i] - static_cast<Wide>(p.mean[c]));
          want[0] += channel_dy[i];
          want[1] += product;
          size[0] += std::abs(static_cast<Wide>(channel_dy[i]));
          size[1] += std::abs(product);
        }
        EXPECT_NEAR(sum_dy[c], static_cast<double>(want[0]),
                    (1e-14 + this->kSumError) * static_cast<double>(size[0]))
            << describe(s) << " channel " << c;
        EXPECT_NEAR(sum_dy_xmu[c], static_cast<double>(want[1]),
                    (1e-14 + this->kSumError) * static_cast<double>(size[1]))
            << describe(s) << " channel " << c;
      }
      for (const Isa isa : supported_isas()) {
        std::vector<double> first(s.channels);
        std::vector<double> second(s.channels);
        batch_norm_table<TypeParam>(isa).backward_reduce(dy.data(), x.data(), s, p.mean.data(),
                                                         first.data(), second.data());
        expect_same_bits(first, sum_dy, describe(s) + std::string(name_of(isa)));
        expect_same_bits(second, sum_dy_xmu, describe(s) + std::string(name_of(isa)));
      }
    }
  }
}

TYPED_TEST(BatchNormTest, backward_elementwise_equals_long_double) {
  for (const BatchNormShape s : shapes()) {
    for (const double mean : {0.5, 1e4}) {
      const auto x = random_values<TypeParam>(n_values(s), mean, 1, 16);
      const auto dy = random_values<TypeParam>(n_values(s), 0.1, 1, 17);
      const auto p = random_parameters<TypeParam>(s.channels, mean);
      for (const bool affine : {true, false}) {
        const TypeParam* weight = affine ? p.weight.data() : nullptr;
        std::vector<TypeParam> dx(x.size());
        batch_norm_table<TypeParam>(Isa::scalar)
            .backward_elementwise(dy.data(), x.data(), s, p.mean.data(), p.invstd.data(), weight,
                                  p.mean_dy.data(), p.mean_dy_xmu.data(), dx.data(),
                                  Stores::cached);
        for (std::size_t i = 0; i < x.size(); ++i) {
          const std::size_t c = i / s.inner % s.channels;
          const Wide scale = p.invstd[c] * (affine ? static_cast<Wide>(weight[c]) : 1);
          const Wide centred = dy[i] - static_cast<Wide>(p.mean_dy[c]);
          const Wide slope =
              (x[i] - static_cast<Wide>(p.mean[c])) * p.invstd[c] * p.invstd[c] * p.mean_dy_xmu[c];
          const Wide want = (centred - slope) * scale;
          const Wide size = (std::abs(centred) + std::abs(slope)) * std::abs(scale);
          ASSERT_NEAR(static_cast<double>(dx[i] - want), 0,
                      4 * this->kEpsilon * static_cast<double>(size))
              << describe(s) << " element " << i;
        }
        for (const Isa isa : supported_isas()) {
          auto in_place = dy;
          batch_norm_table<TypeParam>(isa).backward_elementwise(
              in_place.data(), x.data(), s, p.mean.data(), p.invstd.data(), weight,
              p.mean_dy.data(), p.mean_dy_xmu.data(), in_place.data(), Stores::cached);
          expect_same_bits(in_place, dx, describe(s) + std::string(name_of(isa)));
        }
      }
    }
  }
}

/// The channels [first, first + n) of an activation as a whole of their own.
template <class T>
std::vector<T> channels_of(const std::vector<T>& x, BatchNormShape s, std::size_t first,
                           std::size_t n) {
  std::vector<T> part;
  for (std::size_t o = 0; o < s.outer; ++o) {
    const auto begin = x.begin() + static_cast<std::ptrdiff_t>((o * s.channels + first) * s.inner);
    part.insert(part.end(), begin, begin + static_cast<std::ptrdiff_t>(n * s.inner));
  }
  return part;
}

TYPED_TEST(BatchNormTest, some_channels_in_place_equal_them_alone) {
  for (const BatchNormShape s : shapes()) {
    if (s.channels < 3) continue;
    const std::size_t first = 1;
    const std::size_t n = s.channels - 2;
    const BatchNormShape alone{s.outer, n, s.inner};
    const BatchNormShape in_place{s.outer, n, s.inner, s.channels};
    const auto x = random_values<TypeParam>(n_values(s), 3, 1, 18);
    const auto dy = random_values<TypeParam>(n_values(s), 0, 1, 19);
    const auto part_x = channels_of(x, s, first, n);
    const auto part_dy = channels_of(dy, s, first, n);
    const auto p = random_parameters<TypeParam>(n, 3);
    // Combined rows (only adjacent ones are combined) are summed in another order.
    const bool same_bits = s.inner >= kLongRun;
    for (const Isa isa : supported_isas()) {
      const BatchNormTable<TypeParam>& table = batch_norm_table<TypeParam>(isa);
      const std::size_t at = first * s.inner;
      std::vector<double> got(4 * n);
      table.stats(x.data() + at, in_place, got.data(), got.data() + n);
      table.backward_reduce(dy.data() + at, x.data() + at, in_place, p.mean.data(),
                            got.data() + 2 * n, got.data() + 3 * n);
      std::vector<double> want(4 * n);
      table.stats(part_x.data(), alone, want.data(), want.data() + n);
      table.backward_reduce(part_dy.data(), part_x.data(), alone, p.mean.data(),
                            want.data() + 2 * n, want.data() + 3 * n);
      if (same_bits && n > 1) {
        expect_same_bits(got, want, describe(s) + std::string(name_of(isa)));
      } else {
        for (std::size_t i = 0; i < got.size(); ++i) {
          ASSERT_NEAR(got[i], want[i],
                      (1e-12 + this->kSumError) * (static_cast<double>(s.n_per_channel()) + 1))
              << describe(s) << " sum " << i;
        }
      }
      // Channels that are not requested stay unchanged.
      std::vector<TypeParam> y(x.size(), TypeParam(-7));
      table.normalize(x.data() + at, in_place, p.mean.data(), p.invstd.data(), p.weight.data(),
                      p.bias.data(), y.data() + at, Stores::cached);
      std::vector<TypeParam> part_y(part_x.size());
      table.normalize(part_x.data(), alone, p.mean.data(), p.invstd.data(), p.weight.data(),
                      p.bias.data(), part_y.data(), Stores::cached);
      expect_same_bits(channels_of(y, s, first, n), part_y, describe(s));
      const auto untouched = std::count(y.begin(), y.end(), TypeParam(-7));
      EXPECT_EQ(untouched, static_cast<std::ptrdiff_t>(2 * s.n_per_channel())) << describe(s);
      auto dx = dy;
      table.backward_elementwise(dx.data() + at, x.data() + at, in_place, p.mean.data(),
                                 p.invstd.data(), p.weight.data(), p.mean_dy.data(),
                                 p.mean_dy_xmu.data(), dx.data() + at, Stores::cached);
      std::vector<TypeParam> part_dx(part_dy.size());
      table.backward_elementwise(part_dy.data(), part_x.data(), alone, p.mean.data(),
                                 p.invstd.data(), p.weight.data(), p.mean_dy.data(),
                                 p.mean_dy_xmu.data(), part_dx.data(), Stores::cached);
      expect_same_bits(channels_of(dx, s, first, n), part_dx, describe(s));
      expect_same_bits(channels_of(dx, s, 0, 1), channels_of(dy, s, 0, 1), describe(s));
    }
  }
}

/// Memory at a cache line, which streaming stores need.
template <class T>
class AtALine {
 public:
  explicit AtALine(std::size_t n) : values_(n + 64 / sizeof(T)), n_(n) {}
  T* data() {
    void* start = values_.data();
    std::size_t space = values_.size() * sizeof(T);
    return static_cast<T*>(std::align(64, n_ * sizeof(T), start, space));
  }
  std::vector<T> values() { return {data(), data() + n_}; }

 private:
  std::vector<T> values_;
  std::size_t n_;
};

template <class T>
class StreamingBatchNormTest : public testing::Test {};
using AllTypes = testing::Types<float, double, Float16, BFloat16>;
TYPED_TEST_SUITE(StreamingBatchNormTest, AllTypes);

TYPED_TEST(StreamingBatchNormTest, streamed_outputs_have_the_same_bits) {
  using T = TypeParam;
  auto all = shapes();
  all.push_back({5, 3, 64});
  all.push_back({5, 3, 96});
  // Memory in whole cache lines, whose channels or tiles are not.
  for (const BatchNormShape s : {BatchNormShape{1, 3, 33}, {2, 64, 25}, {3, 512, 9}}) {
    all.push_back(s);
  }
  for (const BatchNormShape s : all) {
    std::vector<T> x;
    std::vector<T> dy;
    for (const float value : random_values<float>(n_values(s), 3, 1, 22)) x.push_back(T(value));
    for (const float value : random_values<float>(n_values(s), 0, 1, 23)) dy.push_back(T(value));
    const auto p = random_parameters<ParameterOf<T>>(s.channels, 3);
    for (const Isa isa : supported_isas()) {
      const BatchNormTable<T>& table = batch_norm_table<T>(isa);
      std::vector<T> outputs[2][2];
      for (const Stores stores : {Stores::cached, Stores::streaming}) {
        AtALine<T> y(x.size());
        AtALine<T> dx(x.size());
        table.normalize(x.data(), s, p.mean.data(), p.invstd.data(), p.weight.data(), p.bias.data(),
                        y.data(), stores);
        table.backward_elementwise(dy.data(), x.data(), s, p.mean.data(), p.invstd.data(),
                                   p.weight.data(), p.mean_dy.data(), p.mean_dy_xmu.data(),
                                   dx.data(), stores);
        auto& of_these = outputs[stores == Stores::streaming ? 1 : 0];
        of_these[0] = y.values();
        of_these[1] = dx.values();
      }
      expect_same_bits(outputs[1][0], outputs[0][0], describe(s) + std::string(name_of(isa)));
      expect_same_bits(outputs[1][1], outputs[0][1], describe(s) + std::string(name_of(isa)));
    }
  }
}

template <class T>
class SixteenBitBatchNormTest : public testing::Test {
 protected:
  static std::vector<T> narrowed(const std::vector<float>& values) {
    std::vector<T> result;
    for (const float value : values) result.push_back(T(value));
    return result;
  }
  static std::vector<float> widened(const std::vector<T>& values) {
    std::vector<float> result;
    for (const T value : values) result.push_back(static_cast<float>(value));
    return result;
  }
};

using SixteenBitTypes = testing::Types<Float16, BFloat16>;
TYPED_TEST_SUITE(SixteenBitBatchNormTest, SixteenBitTypes);

TYPED_TEST(SixteenBitBatchNormTest, equals_the_kernels_of_float_on_widened_values) {
  using Half = TypeParam;
  for (const BatchNormShape s : shapes()) {
    const auto x = this->narrowed(random_values<float>(n_values(s), 3, 2, 20));
    auto dy = this->narrowed(random_values<float>(n_values(s), 0, 1e-3, 21));  // subnormal in f16
    const auto wide_x = this->widened(x);
    const auto wide_dy = this->widened(dy);
    const auto p = random_parameters<float>(s.channels, 3);
    for (const Isa isa : supported_isas()) {
      const BatchNormTable<Half>& table = batch_norm_table<Half>(isa);
      const BatchNormTable<float>& wide = batch_norm_table<float>(isa);
      const std::string what = describe(s) + std::string(name_of(isa));
      std::vector<double> got(4 * s.channels);
      std::vector<double> want(4 * s.channels);
      const auto sums = [&](const auto& kernels, const auto& dys, const auto& xs, double* into) {
        kernels.stats(xs.data(), s, into, into + s.channels);
        kernels.backward_reduce(dys.data(), xs.data(), s, p.mean.data(), into + 2 * s.channels,
                                into + 3 * s.channels);
      };
      sums(table, dy, x, got.data());
      sums(wide, wide_dy, wide_x, want.data());
      expect_same_bits(got, want, what);
      for (const bool affine : {true, false}) {
        const float* weight = affine ? p.weight.data() : nullptr;
        const float* bias = affine ? p.bias.data() : nullptr;
        auto y = x;
        table.normalize(y.data(), s, p.mean.data(), p.invstd.data(), weight, bias, y.data(),
                        Stores::cached);
        auto wide_y = wide_x;
        wide.normalize(wide_x.data(), s, p.mean.data(), p.invstd.data(), weight, bias,
                       wide_y.data(), Stores::cached);
        expect_same_bits(y, this->narrowed(wide_y), what);
        auto dx = dy;
        table.backward_elementwise(dx.data(), x.data(), s, p.mean.data(), p.invstd.data(), weight,
                                   p.mean_dy.data(), p.mean_dy_xmu.data(), dx.data(),
                                   Stores::cached);
        auto wide_dx = wide_dy;
        wide.backward_elementwise(wide_dy.data(), wide_x.data(), s, p.mean.data(), p.invstd.data(),
                                  weight, p.mean_dy.data(), p.mean_dy_xmu.data(), wide_dx.data(),
                                  Stores::cached);
        expect_same_bits(dx, this->narrowed(wide_dx), what);
      }
    }
  }
}

TYPED_TEST(SixteenBitBatchNormTest, values_out_of_range_become_infinite_and_nan_stays) {
  using Half = TypeParam;
  const float infinity = std::numeric_limits<float>::infinity();
  for (const BatchNormShape s : {BatchNormShape{2, 1, 37}, BatchNormShape{37, 1, 1}}) {
    std::vector<float> wide(n_values(s), 1);
    wide[3] = std::numeric_limits<float>::quiet_NaN();
    wide[5] = -infinity;
    auto x = this->narrowed(wide);
    const double mean = 0;
    const double invstd = 1;
    const float weight = std::numeric_limits<float>::max();
    for (const Isa isa : supported_isas()) {
      auto y = x;
      batch_norm_table<Half>(isa).normalize(x.data(), s, &mean, &invstd, &weight, nullptr, y.data(),
                                            Stores::cached);
      for (std::size_t i = 0; i < y.size(); ++i) {
        const auto got = static_cast<float>(y[i]);
        if (i == 3) {
          EXPECT_TRUE(std::isnan(got));
        } else {
          EXPECT_EQ(got, i == 5 ? -infinity : infinity) << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::kernels
