#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <vector>

#include "conformance/reference.hpp"
#include "support/ranks.hpp"

/// What is required of every engine, at every world size; engines_test.cpp has the engines.
namespace lockstep::test {

class Conformance : public ::testing::TestWithParam<Setting> {
 protected:
  void run(const std::function<void()>& body) { run_as(GetParam(), body); }
};
/// Of ranks that are in a world and share memory beside the engine.
class LocalConformance : public Conformance {};

inline constexpr DType kTypes[] = {DType::boolean, DType::u8,  DType::i8,  DType::u16, DType::i16,
                                   DType::u32,     DType::i32, DType::u64, DType::i64, DType::f16,
                                   DType::bf16,    DType::f32, DType::f64};
/// The result of a reduction over a whole group, by hosts where it has several.
inline Bytes all_reduced(DType dtype, ReduceOp op, std::size_t count, std::uint64_t seed,
                         int n_ranks) {
  return hosts().empty() ? reduced(dtype, op, count, seed, n_ranks)
                         : reduced_by_host(dtype, op, count, seed, hosts());
}
/// Around the limits of the inline payload, a slot, a slice; zero; one; odd.
inline constexpr std::size_t kCounts[] = {0, 1, 7, 31, 62, 63, 1000, 4097, 70'001};

inline double sum_of_ones(const Group& group) {
  double one = 1;
  group.all_reduce({&one, 1, DType::f64});
  return one;
}

}  // namespace lockstep::test
