#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <lockstep/engine.hpp>
#include <lockstep/error.hpp>
#include <lockstep/types.hpp>

#include "support/expect.hpp"

namespace lockstep {
namespace {

TEST(TypesTest, reduce_op_names_in_any_case) {
  EXPECT_EQ(parse_reduce_op("sum"), ReduceOp::sum);
  EXPECT_EQ(parse_reduce_op("MEAN"), ReduceOp::mean);
  EXPECT_EQ(parse_reduce_op("Bxor"), ReduceOp::bxor);
}

TEST(TypesTest, unknown_reduce_op_names_the_valid_ones) {
  try {
    parse_reduce_op("average");
    FAIL();
  } catch (const UsageError& error) {
    const std::string text = error.what();
    test::expect_contains(text, "'average'");
    test::expect_contains(text, "mean");
  }
}

TEST(TypesTest, only_types_with_a_dtype_are_arithmetic) {
  static_assert(kDTypeOf<long> == DType::i64 && kDTypeOf<long long> == DType::i64);
  static_assert(kDTypeOf<char> == (std::is_signed_v<char> ? DType::i8 : DType::u8));
  static_assert(kDTypeOf<const float> == DType::f32);
  static_assert(kDTypeOf<bool> == DType::boolean && kDTypeOf<std::size_t> == DType::u64);
  static_assert(kDTypeOf<short> == DType::i16 && kDTypeOf<unsigned> == DType::u32);
  static_assert(!Arithmetic<long double> && !Arithmetic<void*>);
}

TEST(TypesTest, sixteen_bit_floats_round_to_nearest_even) {
  EXPECT_EQ(Float16(1.0F).bits, 0x3c00);
  EXPECT_EQ(Float16(65504.0F).bits, 0x7bff);
  EXPECT_EQ(Float16(65519.9F).bits, 0x7bff);
  EXPECT_EQ(Float16(65520.0F).bits, 0x7c00);
  EXPECT_EQ(Float16(0x1p-24F).bits, 0x0001);
  EXPECT_EQ(Float16(0x1p-25F).bits, 0x0000);  // a tie, to even
  EXPECT_EQ(Float16(0x1.8p-24F).bits, 0x0002);
  EXPECT_EQ(Float16(-0.0F).bits, 0x8000);
  EXPECT_TRUE(std::isnan(static_cast<float>(Float16(std::nanf("")))));
  EXPECT_EQ(BFloat16(1.0F).bits, 0x3f80);
  EXPECT_EQ(BFloat16(0x1.01p0F).bits, 0x3f80);  // a tie, to even
  EXPECT_EQ(BFloat16(0x1.03p0F).bits, 0x3f82);
  EXPECT_EQ(BFloat16(std::numeric_limits<float>::infinity()).bits, 0x7f80);
  EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(std::nanf("")))));
}

TEST(ErrorTest, message_names_operation_group_rank_call_and_line) {
  const Call call{.op = Op::all_reduce,
                  .group = "world",
                  .sequence = 17,
                  .where = std::source_location::current()};
  const MismatchError error(context_of(call, 3), "text");
  const std::string expected = "all_reduce on group 'world' (rank 3, call #17) at types_test.cpp:" +
                               std::to_string(call.where.line()) + ": text";
  EXPECT_EQ(error.what(), expected);
  EXPECT_EQ(error.text(), "text");
}

TEST(TimeoutTest, any_duration_rounded_up_and_cut) {
  using namespace std::chrono_literals;
  const auto of = [](Timeout timeout) { return timeout.or_else(-1ms); };
  EXPECT_EQ(of({}), -1ms);
  EXPECT_EQ(of(2s), 2000ms);
  EXPECT_EQ(of(1ns), 1ms);
  EXPECT_EQ(of(std::chrono::duration<double>(0.25)), 250ms);
  EXPECT_EQ(of(-5s), 0ms);
  EXPECT_EQ(of(std::chrono::milliseconds::min()), 0ms);
  EXPECT_EQ(of(std::chrono::milliseconds::max()), of(Timeout::never()));
  EXPECT_EQ(of(std::chrono::hours::max()), of(Timeout::never()));
  EXPECT_EQ(of(std::chrono::duration<double>(INFINITY)), of(Timeout::never()));
}

}  // namespace
}  // namespace lockstep
