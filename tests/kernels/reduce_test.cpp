#include "kernels/reduce.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <fmt/format.h>

#include "kernels/isas.hpp"
#include "kernels/reduce_isa.hpp"
#include "support/tree.hpp"

namespace lockstep::kernels {
namespace {

// --- the reference: one element at a time, written for reading ----------------------------------

template <class T>
T fold_floats(ReduceOp op, const std::vector<T>& values) {
  const T result = test::combined_in_tree(values, [op](T a, T x) -> T {
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::mean: return a + x;
      case ReduceOp::product: return a * x;
      case ReduceOp::min: return !std::isnan(a) && (std::isnan(x) || x < a) ? x : a;
      case ReduceOp::max: return !std::isnan(a) && (std::isnan(x) || x > a) ? x : a;
      case ReduceOp::band:
      case ReduceOp::bor:
      case ReduceOp::bxor: break;
    }
    ADD_FAILURE() << "bit operation on floats";
    return a;
  });
  return op == ReduceOp::mean ? result / static_cast<T>(values.size()) : result;
}

template <class T>
T fold_integers(ReduceOp op, const std::vector<T>& values) {
  if (op == ReduceOp::mean) {
    __extension__ typedef __int128 Exact;
    Exact sum = 0;
    for (const T x : values) sum += x;
    return static_cast<T>(sum / static_cast<Exact>(values.size()));
  }
  T result = values[0];
  for (std::size_t r = 1; r < values.size(); ++r) {
    const T x = values[r];
    const auto a = static_cast<std::uint64_t>(result);
    const auto b = static_cast<std::uint64_t>(x);
    switch (op) {
      case ReduceOp::sum: result = static_cast<T>(a + b); break;
      case ReduceOp::product: result = static_cast<T>(a * b); break;
      case ReduceOp::min: result = x < result ? x : result; break;
      case ReduceOp::max: result = x > result ? x : result; break;
      case ReduceOp::band: result = static_cast<T>(a & b); break;
      case ReduceOp::bor: result = static_cast<T>(a | b); break;
      case ReduceOp::bxor: result = static_cast<T>(a ^ b); break;
      case ReduceOp::mean: break;
    }
  }
  return result;
}

template <class T>
T reduced(ReduceOp op, const std::vector<T>& values) {
  if constexpr (std::is_integral_v<T>) {
    return fold_integers(op, values);
  } else if constexpr (std::is_floating_point_v<T>) {
    return fold_floats(op, values);
  } else {
    std::vector<float> wide;
    for (const T x : values) wide.push_back(static_cast<float>(x));
    return T(fold_floats(op, wide));
  }
}

template <class T>
bool is_nan(T x) {
  if constexpr (std::is_integral_v<T>) return false;
  return std::isnan(static_cast<double>(static_cast<float>(x)));
}
template <>
bool is_nan(double x) {
  return std::isnan(x);
}

/// Bitwise, but for the payload of a NaN that arithmetic made.
template <class T>
bool same(T got, T want, ReduceOp op) {
  if (op != ReduceOp::min && op != ReduceOp::max && is_nan(want)) return is_nan(got);
  return std::memcmp(&got, &want, sizeof(T)) == 0;
}

/// Any bit pattern: every NaN, infinity and subnormal among them; for floats half of them tame.
template <class T>
T any_value(std::mt19937_64& random) {
  T x;
  const std::uint64_t bits = random();
  if constexpr (std::is_same_v<T, bool>) return (bits & 1U) != 0;
  std::memcpy(static_cast<void*>(&x), &bits, sizeof(T));
  if constexpr (!std::is_integral_v<T>) {
    if ((random() & 1U) != 0) x = T(std::normal_distribution<float>()(random));
  }
  return x;
}

// --- the tests ----------------------------------------------------------------------------------

template <class T>
class ReduceTest : public testing::Test {
 protected:
  /// Reduces n inputs of `count` elements that lie `shift` bytes past their alignment, into
  /// out = input `alias` (none when negative), with every instruction set and with reduce().
  void check(ReduceOp op, int n, std::size_t count, int alias, std::size_t shift) {
    const std::size_t n_bytes = count * sizeof(T);
    std::vector<std::vector<T>> values(static_cast<std::size_t>(n));
    for (auto& input : values) {
      for (std::size_t i = 0; i < count; ++i) input.push_back(any_value<T>(random_));
    }
    std::vector<T> want;
    for (std::size_t i = 0; i < count; ++i) {
      std::vector<T> column;
      for (const auto& input : values) column.push_back(input[i]);
      want.push_back(n == 1 ? column[0] : reduced(op, column));
    }
    std::vector<const ReduceTable*> tables = {nullptr};  // null: reduce() itself
    for (const Isa isa : supported_isas()) {
      if (n > 1) tables.push_back(&reduce_table(isa));
    }
    for (const ReduceTable* table : tables) {
      constexpr unsigned char kGuard = 0xa5;
      std::vector<std::vector<unsigned char>> memory(
          static_cast<std::size_t>(n) + 1, std::vector<unsigned char>(n_bytes + shift + 1, kGuard));
      std::vector<const void*> in;
      for (int r = 0; r < n; ++r) {
        auto& place = memory[static_cast<std::size_t>(r)];
        for (std::size_t i = 0; i < count; ++i) {
          const T x = values[static_cast<std::size_t>(r)][i];  // a vector<bool> has no data()
          std::memcpy(place.data() + shift + i * sizeof(T), &x, sizeof(T));
        }
        in.push_back(place.data() + shift);
      }
      const auto before = memory;
      auto& out = memory[static_cast<std::size_t>(alias < 0 ? n : alias)];
      if (table != nullptr) {
        table->function[static_cast<int>(kDTypeOf<T>)][static_cast<int>(op)](
            in.data(), n, out.data() + shift, count);
      } else {
        reduce(kDTypeOf<T>, op, in.data(), n, out.data() + shift, count);
      }
      for (std::size_t i = 0; i < count; ++i) {
        T got;
        std::memcpy(&got, out.data() + shift + i * sizeof(T), sizeof(T));
        ASSERT_TRUE(same<T>(got, want[i], op)) << fmt::format(
            "{} {} n={} count={} alias={} shift={} element {} got {} want {}", name_of(kDTypeOf<T>),
            name_of(op), n, count, alias, shift, i, static_cast<double>(static_cast<float>(got)),
            static_cast<double>(static_cast<float>(want[i])));
      }
      ASSERT_EQ(out.back(), kGuard) << "wrote past the end";
      for (std::size_t k = 0; k < memory.size(); ++k) {
        if (&memory[k] == &out) continue;
        ASSERT_EQ(memory[k], before[k]) << "input " << k << " changed";
      }
    }
  }

  std::mt19937_64 random_{20240607};
};

using ReduceTypes =
    testing::Types<bool, std::uint8_t, std::int8_t, std::uint16_t, std::int16_t, std::uint32_t,
                   std::int32_t, std::uint64_t, std::int64_t, Float16, BFloat16, float, double>;
TYPED_TEST_SUITE(ReduceTest, ReduceTypes);

TYPED_TEST(ReduceTest, equals_reference) {
  for (const auto& row : kReduceOps) {
    const ReduceOp op = row.op;
    if (!can_reduce(op, kDTypeOf<TypeParam>)) continue;
    for (const int n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 48, 127}) {
      for (const std::size_t count : {0, 1, 3, 63, 1031}) {
        for (const std::size_t shift : {0, 1}) {
          this->check(op, n, count, /*alias=*/-1, shift);
          if (this->HasFatalFailure()) return;
        }
      }
    }
  }
}

TYPED_TEST(ReduceTest, out_may_be_any_input) {
  for (const auto& row : kReduceOps) {
    const ReduceOp op = row.op;
    if (!can_reduce(op, kDTypeOf<TypeParam>)) continue;
    for (const int n : {1, 2, 3, 4, 5, 8, 17}) {
      for (int alias = 0; alias < n; ++alias) {
        this->check(op, n, /*count=*/331, alias, /*shift=*/0);
        if (this->HasFatalFailure()) return;
      }
    }
  }
}

TEST(ReduceOpsTest, bit_operations_are_for_integers) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
    for (const auto& row : kReduceOps) {
      const ReduceOp op = row.op;
      const bool bits = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
      EXPECT_EQ(can_reduce(op, dtype), !bits);
    }
  }
  for (const DType dtype : {DType::u8, DType::i8, DType::u16, DType::i16, DType::u32, DType::i32,
                            DType::u64, DType::i64}) {
    for (const auto& row : kReduceOps) EXPECT_TRUE(can_reduce(row.op, dtype));
  }
}

TEST(ReduceOpsTest, bool_has_no_sum_product_or_mean) {
  for (const auto& row : kReduceOps) {
    const ReduceOp op = row.op;
    const bool is_of_numbers =
        op == ReduceOp::sum || op == ReduceOp::product || op == ReduceOp::mean;
    EXPECT_EQ(can_reduce(op, DType::boolean), !is_of_numbers);
  }
}

TEST(ReduceOpsTest, kernels_are_those_of_the_table) {
  for (const Isa isa : supported_isas()) {
    for (int type = 0; type < kDTypes; ++type) {
      for (const auto& row : kReduceOps) {
        const bool has_kernel =
            reduce_table(isa).function[type][static_cast<int>(row.op)] != nullptr;
        EXPECT_EQ(has_kernel, can_reduce(row.op, static_cast<DType>(type)))
            << name_of(isa) << ' ' << name_of(static_cast<DType>(type)) << ' ' << row.name;
      }
    }
  }
}

template <class T>
T reduce_values(ReduceOp op, std::vector<T> values) {
  std::vector<const void*> in;
  for (const T& x : values) in.push_back(&x);
  T out;
  reduce(kDTypeOf<T>, op, in.data(), static_cast<int>(values.size()), &out, 1);
  return out;
}

TEST(ReduceOpsTest, integer_mean_truncates_toward_zero) {
  EXPECT_EQ(reduce_values<std::int32_t>(ReduceOp::mean, {-3, -4}), -3);
  EXPECT_EQ(reduce_values<std::int32_t>(ReduceOp::mean, {3, 4}), 3);
  EXPECT_EQ(reduce_values<std::int64_t>(ReduceOp::mean, {-3, -4}), -3);
  EXPECT_EQ(reduce_values<std::uint8_t>(ReduceOp::mean, {255, 255, 254}), 254);
  EXPECT_EQ(reduce_values<std::int8_t>(ReduceOp::mean, {-128, -128}), -128);
  constexpr std::int32_t kLarge = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(reduce_values<std::int32_t>(ReduceOp::mean, {kLarge, kLarge, kLarge}), kLarge);
}

TEST(ReduceOpsTest, mean_of_64_bit_integers_does_not_wrap) {
  using Signed = std::numeric_limits<std::int64_t>;
  using Unsigned = std::numeric_limits<std::uint64_t>;
  EXPECT_EQ(reduce_values<std::int64_t>(ReduceOp::mean, {Signed::max(), Signed::max()}),
            Signed::max());
  EXPECT_EQ(reduce_values<std::int64_t>(ReduceOp::mean, {Signed::min(), Signed::min(), -2}),
            (Signed::min() / 3) * 2 - 2);
  EXPECT_EQ(reduce_values<std::int64_t>(ReduceOp::mean, {Signed::max(), Signed::min()}), 0);
  EXPECT_EQ(reduce_values<std::uint64_t>(ReduceOp::mean, {Unsigned::max(), Unsigned::max() - 1}),
            Unsigned::max() - 1);
  EXPECT_EQ(reduce_values<std::uint32_t>(ReduceOp::mean, {0xffffffffU, 0xffffffffU}), 0xffffffffU);
}

TEST(ReduceOpsTest, sixteen_bit_sums_round_once) {
  // 2048 + 1 is a tie that f16 rounds to 2048, so rounding after each step would lose both ones.
  EXPECT_EQ(static_cast<float>(reduce_values<Float16>(
                ReduceOp::sum, {Float16(2048.F), Float16(1.F), Float16(1.F)})),
            2050.F);
  EXPECT_EQ(static_cast<float>(reduce_values<BFloat16>(
                ReduceOp::sum, {BFloat16(256.F), BFloat16(1.F), BFloat16(1.F)})),
            258.F);
}

TEST(ReduceOpsTest, first_nan_wins_in_min_and_max) {
  const auto nan = [](std::uint32_t payload) {
    return std::bit_cast<float>(0x7fc00000U | payload);
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    const float got = reduce_values<float>(op, {-kInfinity, 1.F, nan(5), kInfinity, nan(6), 0.F});
    EXPECT_EQ(std::bit_cast<std::uint32_t>(got), 0x7fc00005U);
  }
}

struct Moments {
  double count, mean, m2, unused;
  bool operator==(const Moments&) const = default;
};

Moments moments_of(const std::vector<double>& values) {
  long double mean = 0, m2 = 0;
  for (const double x : values) mean += x;
  if (!values.empty()) mean /= static_cast<long double>(values.size());
  for (const double x : values) m2 += (x - mean) * (x - mean);
  return {static_cast<double>(values.size()), static_cast<double>(mean), static_cast<double>(m2),
          0};
}

Moments merged_moments(const std::vector<Moments>& parts) {
  std::vector<const void*> in;
  for (const Moments& part : parts) in.push_back(&part);
  Moments out{};
  reduce(detail::kMoments, ReduceOp::sum, in.data(), static_cast<int>(in.size()), &out, 1);
  return out;
}

TEST(ReduceMomentsTest, are_those_of_all_samples_together) {
  std::mt19937_64 random(5);
  for (const double mean : {0.0, 1.0, 1e6}) {
    std::normal_distribution<double> normal(mean, 1);
    std::vector<Moments> parts;
    std::vector<double> all;
    for (const std::size_t count : {0U, 5U, 1U, 0U, 300U, 17U}) {
      std::vector<double> values(count);
      for (double& x : values) x = normal(random);
      parts.push_back(moments_of(values));
      all.insert(all.end(), values.begin(), values.end());
    }
    const Moments got = merged_moments(parts), right = moments_of(all);
    EXPECT_EQ(got.count, right.count);
    EXPECT_NEAR(got.mean, right.mean, 1e-15 * (1 + mean));
    EXPECT_NEAR(got.m2, right.m2, 1e-12 * right.m2);
  }
}

TEST(ReduceMomentsTest, of_no_sample_are_zero_and_of_one_part_are_its_own) {
  EXPECT_EQ(merged_moments({{0, 7, 8, 0}, {0, 9, 1, 0}}), (Moments{0, 0, 0, 0}));
  EXPECT_EQ(merged_moments({{0, 7, 8, 0}, {3, 0.1, 0.7, 0}, {0, 7, 8, 0}}),
            (Moments{3, 0.1, 0.7, 0}));
}

TEST(ReduceMomentsTest, have_only_a_sum) {
  for (const auto& row : kReduceOps) {
    EXPECT_EQ(can_reduce(row.op, detail::kMoments), row.op == ReduceOp::sum);
  }
}

// --- conversions --------------------------------------------------------------------------------

/// Rounds to `digits` significand bits with the least exponent `least`, in double arithmetic.
double rounded(double x, int digits, int least, double largest) {
  if (x == 0 || std::isinf(x)) return x;
  int exponent = 0;
  (void)std::frexp(x, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - digits, least));
  const double result = std::nearbyint(x / unit) * unit;
  if (std::abs(result) > largest) return std::copysign(INFINITY, x);
  return result;
}

TEST(ConversionTest, every_float16_widens_exactly_and_returns) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    Float16 half;
    half.bits = static_cast<std::uint16_t>(bits);
    const auto wide = static_cast<float>(half);
    const std::uint32_t exponent = (bits >> 10) & 0x1fU;
    const std::uint32_t significand = bits & 0x3ffU;
    if (exponent == 0x1fU && significand != 0) {
      ASSERT_TRUE(std::isnan(wide));
      ASSERT_EQ(Float16(wide).bits, bits | 0x200U);
      continue;
    }
    double want = exponent == 0x1fU ? static_cast<double>(INFINITY)
                  : exponent == 0U
                      ? std::ldexp(significand, -24)
                      : std::ldexp(significand + 1024, static_cast<int>(exponent) - 25);
    if ((bits & 0x8000U) != 0) want = -want;
    ASSERT_EQ(static_cast<double>(wide), want) << bits;
    ASSERT_EQ(std::signbit(wide), std::signbit(want)) << bits;
    ASSERT_EQ(Float16(wide).bits, bits);
  }
}

TEST(ConversionTest, every_bfloat16_widens_exactly_and_returns) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    BFloat16 brain;
    brain.bits = static_cast<std::uint16_t>(bits);
    const auto wide = static_cast<float>(brain);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(wide), bits << 16);
    ASSERT_EQ(BFloat16(wide).bits, std::isnan(wide) ? bits | 0x40U : bits);
  }
}

TEST(ConversionTest, narrowing_rounds_to_nearest_even) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 2'000'000; ++i) {
    auto word = static_cast<std::uint32_t>(random());
    if (i % 2 == 0) {  // near f16's range, and often a tie
      word = (word & 0x80007fffU) | (((word >> 15) & 0xffU) % 48 + 96) << 23 |
             (static_cast<std::uint32_t>(random()) & 0x7fe000U);
      if (i % 4 == 0) word = (word & ~0x1fffU) | 0x1000U;
    }
    const auto x = std::bit_cast<float>(word);
    const Float16 half(x);
    const BFloat16 brain(x);
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(static_cast<float>(half)) && std::isnan(static_cast<float>(brain)));
      continue;
    }
    ASSERT_EQ(static_cast<double>(static_cast<float>(half)), rounded(x, 11, -24, 65504.0)) << x;
    ASSERT_EQ(static_cast<double>(static_cast<float>(brain)), rounded(x, 8, -133, 0x1.fep127)) << x;
    ASSERT_EQ(std::signbit(static_cast<float>(half)), std::signbit(x));
  }
}

// The bodies have their own conversions: all of f16 and bf16 pass through them, against types.hpp.
template <class T>
void check_all_pairs_with(std::uint16_t other_bits) {
  std::vector<T> all(0x10000);
  for (std::size_t i = 0; i < all.size(); ++i) all[i].bits = static_cast<std::uint16_t>(i);
  T other;
  other.bits = other_bits;
  const std::vector<T> others(all.size(), other);
  const void* const in[] = {all.data(), others.data()};
  for (const Isa isa : supported_isas()) {
    for (const ReduceOp op :
         {ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max, ReduceOp::mean}) {
      std::vector<T> out(all.size());
      reduce_table(isa).function[static_cast<int>(kDTypeOf<T>)][static_cast<int>(op)](
          in, 2, out.data(), out.size());
      for (std::size_t i = 0; i < all.size(); ++i) {
        const T want = reduced<T>(op, {all[i], other});
        ASSERT_TRUE(same(out[i], want, op))
            << fmt::format("{} {} {:#x} {:#x}: got {:#x}, want {:#x}", name_of(isa), name_of(op), i,
                           other_bits, out[i].bits, want.bits);
      }
    }
  }
}

TEST(ConversionTest, bodies_convert_as_types_do) {
  // 0, least subnormal, 1/2, 1, one ulp more, the largest, infinity, a NaN, and some negatives
  for (const int bits : {0x0000, 0x0001, 0x3800, 0x3c00, 0x3c01, 0x7bff, 0x7c00, 0x7d01, 0x8000,
                         0x83ff, 0x9555, 0xc000, 0xfbff}) {
    check_all_pairs_with<Float16>(static_cast<std::uint16_t>(bits));
    check_all_pairs_with<BFloat16>(static_cast<std::uint16_t>(bits));
  }
}

}  // namespace
}  // namespace lockstep::kernels
