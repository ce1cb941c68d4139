// Groups of a world, and many calls over them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "conformance/conformance.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

TEST_P(Conformance, split_orders_by_key_and_groups_are_apart) {
  run([] {
    const Group world = default_group();
    const int color = world.rank() % 2;
    const Group half = world.split(color, /*key=*/-world.rank());
    const int n_half = (world.size() + 1 - color) / 2;
    ASSERT_EQ(half.size(), n_half);
    ASSERT_EQ(half.rank(), n_half - 1 - world.rank() / 2);  // keys descend with the rank
    EXPECT_EQ(half.backend(), world.backend());
    EXPECT_EQ(all_reduce_value(1, ReduceOp::sum, half), n_half);
    int expected = 0;
    for (int r = color; r < world.size(); r += 2) expected += r;
    EXPECT_EQ(all_reduce_value(world.rank(), ReduceOp::sum, half), expected);
    const Group again = half.split(half.rank());
    EXPECT_EQ(again.size(), 1);
    EXPECT_EQ(all_reduce_value(5, ReduceOp::sum, again), 5);
    EXPECT_EQ(all_reduce_value(1), world.size());  // the world remains usable
  });
}

TEST_P(Conformance, a_duplicate_has_a_channel_of_its_own) {
  run([] {
    const Group world = default_group();
    const Group other = world.duplicate();
    std::vector<double> slow(100'000, 1.0);
    Work work = other.all_reduce_async({slow.data(), slow.size(), DType::f64});
    for (int i = 0; i < 20; ++i) ASSERT_EQ(all_reduce_value(1), world.size());
    work.wait();
    EXPECT_TRUE(work.done());
    EXPECT_EQ(slow.back(), world.size());
  });
}

TEST_P(Conformance, barrier_waits_for_every_rank) {
  run([] {
    // Each rank in turn is late; a rank that passes must have seen the late one's message.
    for (int late = 0; late < get_world_size(); ++late) {
      std::int64_t mark = 0;
      if (get_rank() == late) mark = late + 1;
      EXPECT_EQ(all_reduce_value(mark, ReduceOp::max), late + 1);
      barrier();
    }
  });
}

TEST_P(Conformance, values_and_seed_are_alike_on_all_ranks) {
  run([] {
    EXPECT_EQ(all_reduce_value(get_rank(), ReduceOp::max), get_world_size() - 1);
    EXPECT_EQ(all_reduce_value(-3, ReduceOp::mean), -3);
    const std::uint64_t seed = sync_random_seed();
    EXPECT_EQ(all_reduce_value(seed, ReduceOp::min), all_reduce_value(seed, ReduceOp::max));
    EXPECT_EQ(all_reduce_value(get_rank() == 0, ReduceOp::bor), true);
    EXPECT_EQ(all_reduce_value(get_rank() == 0, ReduceOp::band), get_world_size() == 1);
    EXPECT_NE(sync_random_seed(), sync_random_seed());
  });
}

TEST_P(Conformance, ten_thousand_mixed_collectives) {
  // A call over TCP or over several levels takes milliseconds if there are more ranks than cores.
  const Form form = GetParam().form;
  bool is_slow = form != Form::solo && form != Form::threads && form != Form::processes;
#ifdef LOCKSTEP_CONFORMANCE_ENGINE
  is_slow = true;  // it sleeps in every call
#endif
  const int n_calls = is_slow ? 300 : GetParam().n_ranks > 4 ? 2'500 : 10'000;
  run([n_calls] {
    const Group group = default_group();
    const auto n = static_cast<std::size_t>(group.size());
    std::mt19937_64 random(20);  // the same on every rank
    for (int call = 0; call < n_calls; ++call) {
      const auto kind = random() % 8;
      const DType dtype = kTypes[random() % std::size(kTypes)];
      const ReduceOp any = kReduceOps[random() % kReduceOps.size()].op;
      const ReduceOp op = is_floating(dtype)       ? ReduceOp::sum
                          : can_reduce(any, dtype) ? any
                                                   : ReduceOp::bor;
      const std::size_t count = random() % (call % 100 == 0 ? 40'000 : 300);
      const int root = static_cast<int>(random() % n);
      const std::uint64_t seed = random() % 1000;
      const std::size_t n_bytes = count * size_of(dtype);
      const Bytes mine = values(dtype, count, seed, group.rank());
      Bytes data = mine;
      Bytes all(n_bytes * n);
      switch (kind) {
        case 0: group.barrier(); break;
        case 1:
          group.all_reduce({data.data(), count, dtype}, op);
          ASSERT_EQ(data, all_reduced(dtype, op, count, seed, group.size())) << call;
          break;
        case 2:
          group.reduce({data.data(), count, dtype}, root, op);
          ASSERT_EQ(data, root == group.rank() ? all_reduced(dtype, op, count, seed, group.size())
                                               : mine);
          break;
        case 3:
          group.broadcast({data.data(), count, dtype}, root);
          ASSERT_EQ(data, values(dtype, count, seed, root)) << call;
          break;
        case 4:
          group.all_gather({mine.data(), count, dtype}, {all.data(), count * n, dtype});
          for (int r = 0; r < group.size(); ++r) {
            ASSERT_EQ(piece(all, r, n_bytes), values(dtype, count, seed, r)) << call;
          }
          break;
        case 5:
          group.gather({mine.data(), count, dtype}, {all.data(), count * n, dtype}, root);
          for (int r = 0; root == group.rank() && r < group.size(); ++r) {
            ASSERT_EQ(piece(all, r, n_bytes), values(dtype, count, seed, r)) << call;
          }
          break;
        case 6: {
          const Bytes whole = values(dtype, count * n, seed, group.rank());
          group.reduce_scatter({whole.data(), count * n, dtype}, {data.data(), count, dtype}, op);
          ASSERT_EQ(data, piece(all_reduced(dtype, op, count * n, seed, group.size()), group.rank(),
                                n_bytes));
          break;
        }
        case 7: {
          const Bytes whole = values(dtype, count * n, seed, group.rank());
          group.all_to_all({whole.data(), count * n, dtype}, {all.data(), count * n, dtype});
          for (int r = 0; r < group.size(); ++r) {
            ASSERT_EQ(piece(all, r, n_bytes),
                      piece(values(dtype, count * n, seed, r), group.rank(), n_bytes));
          }
          break;
        }
        default: break;
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::test
