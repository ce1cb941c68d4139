#include <gtest/gtest.h>

#include "engines/message/header.hpp"

namespace lockstep::message {
namespace {

TEST(MessageHeaderTest, every_difference_of_a_reduce_is_seen) {
  const Call call{.op = Op::reduce,
                  .dtype = DType::f32,
                  .reduce = ReduceOp::sum,
                  .root = 0,
                  .count = 3,
                  .where = {}};
  HeaderMaker headers;
  const auto agrees = [&](const Call& other) {
    return same_signature(headers.of(call), headers.of(other), /*compares_sites=*/false);
  };
  EXPECT_TRUE(agrees(call));
  for (const auto change :
       {+[](Call& c) { c.op = Op::all_reduce; }, +[](Call& c) { c.dtype = DType::f64; },
        +[](Call& c) { c.reduce = ReduceOp::max; }, +[](Call& c) { c.root = 1; },
        +[](Call& c) { c.count = 4; }}) {
    Call other = call;
    change(other);
    EXPECT_FALSE(agrees(other));
  }
}

/// An operation without a root compares what the caller gives in its place.
TEST(MessageHeaderTest, another_tag_is_seen) {
  const Call call{.op = Op::all_reduce, .dtype = DType::f64, .root = 3, .count = 3, .where = {}};
  HeaderMaker headers;
  Call other = call;
  EXPECT_TRUE(same_signature(headers.of(call), headers.of(other), /*compares_sites=*/false));
  other.root = 4;
  EXPECT_FALSE(same_signature(headers.of(call), headers.of(other), /*compares_sites=*/false));
}

}  // namespace
}  // namespace lockstep::message
