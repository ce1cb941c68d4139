// Data that is moved as it is: broadcast, gather, scatter, all_to_all; and all operations around
// thresholds.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "conformance/conformance.hpp"

namespace lockstep::test {
namespace {

TEST_P(Conformance, broadcast_from_every_root) {
  run([] {
    const Group group = default_group();
    for (const std::size_t count : kCounts) {
      for (int root = 0; root < group.size(); ++root) {
        Bytes data = values(DType::f64, count, /*seed=*/6, group.rank());
        group.broadcast({data.data(), count, DType::f64}, root);
        ASSERT_EQ(data, values(DType::f64, count, /*seed=*/6, root));
      }
    }
  });
}

TEST_P(Conformance, all_gather_of_equal_parts) {
  run([] {
    const Group group = default_group();
    for (const std::size_t count : kCounts) {
      const Bytes mine = values(DType::i32, count, /*seed=*/7, group.rank());
      Bytes all(mine.size() * static_cast<std::size_t>(group.size()));
      group.all_gather({mine.data(), count, DType::i32},
                       {all.data(), count * static_cast<std::size_t>(group.size()), DType::i32});
      Bytes expected;
      for (int r = 0; r < group.size(); ++r) append(expected, values(DType::i32, count, 7, r));
      ASSERT_EQ(all, expected);
    }
  });
}

TEST_P(Conformance, gathers_of_unequal_parts) {
  run([] {
    // Rank 1 has an empty part; the part of rank 0 alone exceeds a slot.
    const int rank = get_rank();
    const auto length = [](int r) { return r == 1 ? 0 : 100'000 / (r + 1) + r; };
    std::vector<int> mine(static_cast<std::size_t>(length(rank)));
    std::iota(mine.begin(), mine.end(), 1000 * rank);
    for (const auto& parts : {all_gather(mine), gather(mine, /*dst=*/0)}) {
      if (parts.empty()) continue;  // gather, on another rank
      ASSERT_EQ(parts.size(), static_cast<std::size_t>(get_world_size()));
      for (int r = 0; r < get_world_size(); ++r) {
        const auto& part = parts[static_cast<std::size_t>(r)];
        ASSERT_EQ(part.size(), static_cast<std::size_t>(length(r)));
        for (std::size_t i = 0; i < part.size(); ++i) {
          ASSERT_EQ(part[i], 1000 * r + static_cast<int>(i));
        }
      }
    }
    EXPECT_EQ(gather(mine, get_world_size() - 1).empty(), rank != get_world_size() - 1);
    const auto name_of_rank = [](int r) { return std::string(static_cast<std::size_t>(r), 'x'); };
    const std::vector<std::string> names = all_gather(name_of_rank(rank));
    for (int r = 0; r < get_world_size(); ++r) {
      EXPECT_EQ(names[static_cast<std::size_t>(r)], name_of_rank(r));
    }
  });
}

TEST_P(Conformance, scatter_from_every_root) {
  run([] {
    const Group group = default_group();
    const auto n = static_cast<std::size_t>(group.size());
    for (const std::size_t count : kCounts) {
      for (int root = 0; root < group.size(); ++root) {
        const Bytes all = values(DType::i64, count * n, /*seed=*/8, root);
        const bool is_root = root == group.rank();
        Bytes part(count * 8);
        group.scatter({is_root ? all.data() : nullptr, is_root ? count * n : 0, DType::i64},
                      {part.data(), count, DType::i64}, root);
        ASSERT_EQ(part, piece(all, group.rank(), count * 8));
      }
    }
  });
}

TEST_P(Conformance, all_to_all_of_every_length) {
  run([] {
    const Group group = default_group();
    const auto n = static_cast<std::size_t>(group.size());
    for (const std::size_t count : kCounts) {
      const Bytes sent = values(DType::f32, count * n, /*seed=*/10, group.rank());
      Bytes received(sent.size());
      group.all_to_all({sent.data(), count * n, DType::f32},
                       {received.data(), count * n, DType::f32});
      Bytes expected;
      for (int r = 0; r < group.size(); ++r) {
        append(expected, piece(values(DType::f32, count * n, 10, r), group.rank(), count * 4));
      }
      ASSERT_EQ(received, expected);
    }
  });
}

/// Sizes at which engines change from one algorithm to another.
TEST_P(Conformance, every_operation_around_4_8_and_16_KiB) {
  run([] {
    const Group group = default_group();
    const int n_ranks = group.size(), root = n_ranks - 1;
    const bool is_root = group.rank() == root;
    const auto n = static_cast<std::size_t>(n_ranks);
    constexpr DType kType = DType::i32;
    for (const std::size_t count : {1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097}) {
      const Bytes mine = values(kType, count, /*seed=*/30, group.rank());
      const Bytes whole = values(kType, count * n, /*seed=*/31, group.rank());
      const Bytes sum = all_reduced(kType, ReduceOp::sum, count, /*seed=*/30, n_ranks);
      Bytes gathered, exchanged;
      for (int r = 0; r < n_ranks; ++r) {
        append(gathered, values(kType, count, /*seed=*/30, r));
        append(exchanged, piece(values(kType, count * n, 31, r), group.rank(), mine.size()));
      }
      Bytes data = mine, all(whole.size());
      const Elements one{data.data(), count, kType}, many{all.data(), count * n, kType};
      const ConstElements from_one{mine.data(), count, kType};
      const ConstElements from_many{whole.data(), count * n, kType};
      group.all_reduce(one);
      ASSERT_EQ(data, sum) << count;
      data = mine;
      group.reduce(one, root);
      ASSERT_EQ(data, is_root ? sum : mine) << count;
      data = mine;
      group.broadcast(one, root);
      ASSERT_EQ(data, piece(gathered, root, mine.size())) << count;
      group.all_gather(from_one, many);
      ASSERT_EQ(all, gathered) << count;
      std::ranges::fill(all, std::byte{1});
      group.gather(from_one, many, root);
      ASSERT_EQ(all, is_root ? gathered : Bytes(all.size(), std::byte{1})) << count;
      group.scatter(is_root ? from_many : ConstElements{nullptr, 0, kType}, one, root);
      ASSERT_EQ(data, piece(values(kType, count * n, 31, root), group.rank(), mine.size()))
          << count;
      group.reduce_scatter(from_many, one);
      ASSERT_EQ(data, piece(all_reduced(kType, ReduceOp::sum, count * n, 31, n_ranks), group.rank(),
                            mine.size()))
          << count;
      group.all_to_all(from_many, many);
      ASSERT_EQ(all, exchanged) << count;
    }
  });
}

TEST_P(Conformance, all_gather_of_bool) {
  run([] {
    const std::array<bool, 2> mine = {get_rank() == 0, true};
    const std::vector<std::vector<bool>> all = all_gather(mine);
    for (std::size_t r = 0; r < all.size(); ++r) {
      EXPECT_EQ(all[r], (std::vector<bool>{r == 0, true}));
    }
  });
}

}  // namespace
}  // namespace lockstep::test
