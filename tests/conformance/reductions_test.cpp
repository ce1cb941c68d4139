// Sums and other reductions: all_reduce, reduce, reduce_scatter, statistics.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "conformance/conformance.hpp"
#include "support/expect.hpp"
#include "support/ranks.hpp"

namespace lockstep::test {
namespace {

TEST_P(Conformance, all_reduce_of_every_type_and_reduction) {
  run([] {
    const Group group = default_group();
    for (const DType dtype : kTypes) {
      for (const auto& row : kReduceOps) {
        const ReduceOp op = row.op;
        if (!can_reduce(op, dtype)) continue;
        for (const std::size_t count : {std::size_t{1}, std::size_t{67}, std::size_t{33'333}}) {
          Bytes data = values(dtype, count, /*seed=*/count, group.rank());
          group.all_reduce({data.data(), count, dtype}, op);
          ASSERT_EQ(data, all_reduced(dtype, op, count, /*seed=*/count, group.size()))
              << name_of(dtype) << ' ' << name_of(op) << ' ' << count;
        }
      }
    }
  });
}

// In nightly.
TEST_P(Conformance, all_reduce_of_64_mebibytes) {
  run([] {
    const Group group = default_group();
    constexpr std::size_t kCount = (64UL << 20) / sizeof(float);
    Bytes data = values(DType::f32, kCount, /*seed=*/1, group.rank());
    group.all_reduce({data.data(), kCount, DType::f32});
    ASSERT_EQ(data, all_reduced(DType::f32, ReduceOp::sum, kCount, /*seed=*/1, group.size()));
  });
}

TEST_P(Conformance, all_reduce_of_every_length) {
  run([] {
    const Group group = default_group();
    for (const std::size_t count : kCounts) {
      for (const DType dtype : {DType::u8, DType::f32, DType::f64}) {
        Bytes data = values(dtype, count, /*seed=*/1, group.rank());
        group.all_reduce({data.data(), count, dtype});
        ASSERT_EQ(data, all_reduced(dtype, ReduceOp::sum, count, /*seed=*/1, group.size()))
            << count;
      }
    }
  });
}

TEST_P(Conformance, all_reduce_of_many_chunks) {
  run([] {
    const Group group = default_group();
    const std::size_t count = 1'000'003;
    Bytes data = values(DType::f32, count, /*seed=*/2, group.rank());
    group.all_reduce({data.data(), count, DType::f32}, ReduceOp::mean);
    ASSERT_EQ(data, all_reduced(DType::f32, ReduceOp::mean, count, /*seed=*/2, group.size()));
  });
}

TEST_P(Conformance, all_reduce_in_shared_buffers) {
  run([] {
    const Group group = default_group();
    SharedBuffer buffer = group.allocate(1'000'000);
    ASSERT_EQ(buffer.size(), 1'000'000U);
    for (const std::size_t count : {1, 100, 5'000, 250'000}) {
      const Bytes mine = values(DType::f32, count, /*seed=*/3, group.rank());
      std::memcpy(buffer.data(), mine.data(), mine.size());
      group.all_reduce({buffer.data(), count, DType::f32});
      const Bytes expected =
          all_reduced(DType::f32, ReduceOp::sum, count, /*seed=*/3, group.size());
      ASSERT_EQ(std::memcmp(buffer.data(), expected.data(), expected.size()), 0) << count;
    }
    // At another offset in the buffer, and with ordinary memory on one rank.
    const std::size_t count = 20'000;
    Bytes ordinary = values(DType::f32, count, /*seed=*/4, group.rank());
    std::memcpy(buffer.data() + 4096, ordinary.data(), ordinary.size());
    void* data = group.rank() == 0 ? ordinary.data() : buffer.data() + 4096;
    group.all_reduce({data, count, DType::f32}, ReduceOp::max);
    const Bytes expected = all_reduced(DType::f32, ReduceOp::max, count, /*seed=*/4, group.size());
    ASSERT_EQ(std::memcmp(data, expected.data(), expected.size()), 0);
    // A second buffer, after the first is freed.
    buffer = group.allocate(64);
    EXPECT_EQ(buffer.as<double>().size(), 8U);
    EXPECT_EQ(buffer.as<double>()[7], 0.0);
  });
}

#ifndef LOCKSTEP_CONFORMANCE_ENGINE  // which need not reduce them
TEST_P(Conformance, moments_of_all_ranks) {
  struct Moments {
    double count, mean, m2, unused;
  };
  run([] {
    const Group group = default_group();
    for (const std::size_t count : {1, 64, 5'000}) {
      // Rank r has r values, in sample i all i + r.
      const auto of = [](std::size_t i, int r) {
        return Moments{static_cast<double>(r), static_cast<double>(i) + r, 0, 0};
      };
      std::vector<Moments> data;
      for (std::size_t i = 0; i < count; ++i) data.push_back(of(i, group.rank()));
      group.all_reduce({data.data(), count, detail::kMoments});
      for (std::size_t i = 0; i < count; ++i) {
        double n = 0, sum = 0, m2 = 0;
        for (int r = 0; r < group.size(); ++r) {
          n += r;
          sum += r * of(i, r).mean;
        }
        for (int r = 0; r < group.size(); ++r) {
          m2 += r * (of(i, r).mean - sum / n) * (of(i, r).mean - sum / n);
        }
        ASSERT_EQ(data[i].count, n);
        if (n == 0) continue;
        ASSERT_NEAR(data[i].mean, sum / n, 1e-12 * sum);
        ASSERT_NEAR(data[i].m2, m2, 1e-12 * (1 + m2));
      }
      // The same bits on all ranks.
      std::vector<Moments> of_last = data;
      group.broadcast({of_last.data(), count, detail::kMoments}, group.size() - 1);
      ASSERT_EQ(std::memcmp(data.data(), of_last.data(), count * sizeof(Moments)), 0);
    }
    EXPECT_THROW(group.all_reduce({nullptr, 0, detail::kMoments}, ReduceOp::mean), UsageError);
  });
}
#endif

TEST_P(Conformance, reduce_leaves_other_ranks_alone) {
  run([] {
    const Group group = default_group();
    for (const std::size_t count : kCounts) {
      for (int root = 0; root < group.size(); ++root) {
        const Bytes before = values(DType::i32, count, /*seed=*/5, group.rank());
        Bytes data = before;
        group.reduce({data.data(), count, DType::i32}, root, ReduceOp::sum);
        const bool is_root = root == group.rank();
        ASSERT_EQ(data, is_root ? all_reduced(DType::i32, ReduceOp::sum, count, 5, group.size())
                                : before);
      }
    }
  });
}

TEST_P(Conformance, reduce_scatter_of_every_length) {
  run([] {
    const Group group = default_group();
    const auto n = static_cast<std::size_t>(group.size());
    for (const std::size_t count : kCounts) {
      for (const DType dtype : {DType::i8, DType::bf16, DType::f64}) {
        const Bytes all = values(dtype, count * n, /*seed=*/9, group.rank());
        Bytes part(count * size_of(dtype));
        group.reduce_scatter({all.data(), count * n, dtype}, {part.data(), count, dtype},
                             ReduceOp::sum);
        ASSERT_EQ(part, piece(all_reduced(dtype, ReduceOp::sum, count * n, 9, group.size()),
                              group.rank(), part.size()));
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::test
