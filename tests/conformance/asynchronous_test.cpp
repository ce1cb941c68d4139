// Calls that run while the rank goes on.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "conformance/conformance.hpp"
#include "support/expect.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

TEST_P(Conformance, asynchronous_calls_run_in_order) {
  run([] {
    const Group group = default_group();
    const auto n = static_cast<std::size_t>(group.size());
    std::vector<float> data(1000, 1.0F);
    std::vector<float> part(1000);
    std::vector<float> all(1000 * n);
    std::vector<Work> works;
    const Elements elements{data.data(), data.size(), DType::f32};
    works.push_back(group.all_reduce_async(elements));
    works.push_back(group.barrier_async());
    works.push_back(group.all_reduce_async(elements));
    works.push_back(group.broadcast_async(elements, group.size() - 1));
    works.push_back(group.all_gather_async(elements, {all.data(), all.size(), DType::f32}));
    works.push_back(group.scatter_async({all.data(), all.size(), DType::f32},
                                        {part.data(), part.size(), DType::f32}));
    works.push_back(group.reduce_scatter_async({all.data(), all.size(), DType::f32},
                                               {part.data(), part.size(), DType::f32}));
    const float sum = static_cast<float>(n) * static_cast<float>(n);
    // A blocking call waits for the calls started before.
    EXPECT_EQ(all_reduce_value(1), group.size());
    for (Work& work : works) {
      EXPECT_TRUE(work.done());
      work.wait();
    }
    EXPECT_EQ(data[999], sum);
    EXPECT_EQ(part[0], sum * static_cast<float>(n));
  });
}

/// Neither the group nor the Work exists any longer to wait for it.
TEST_P(LocalConformance, a_detached_call_ends_before_its_rank_leaves) {
  const SharedCount tid;
  const SharedCount n_left;
  run([&] {
    const int n = get_world_size();
    const Group other = default_group().duplicate();
    std::vector<double> data(1000, 1.0);
    if (get_rank() == 0) {
      other.all_reduce_async({data.data(), data.size(), DType::f64}).detach();
      tid.store(::gettid());
      destroy_dist();
      n_left.raise();
    } else {
      EXPECT_TRUE(wait_until(
          [&] { return n_left.value() > 0 || (tid.value() != 0 && is_asleep(tid.value())); }));
      other.all_reduce({data.data(), data.size(), DType::f64});
    }
    EXPECT_EQ(data.front(), n);
    EXPECT_EQ(data.back(), n);
  });
}

TEST_P(LocalConformance, a_failing_departure_ends_the_ranks_own_pending_calls) {
  SKIP_UNLESS_RANKS(2, GetParam());
  const SharedCount n_left;
  run([&] {
    if (get_world_size() == 1) return;  // launched alone
    const Group world = default_group();
    const Group other = world.duplicate();
    if (get_rank() == 0) {
      Work pending = other.barrier_async(std::chrono::seconds(20));
      other.barrier_async(std::chrono::seconds(20)).detach();
      destroy_dist("the disk is full");
      expect_contains(thrown<PeerFailed>([&] { pending.wait(); }),
                      "rank 0 failed: the disk is full");
      n_left.raise();
    } else {
      expect_contains(thrown<PeerFailed>([&] { world.barrier(); }), "the disk is full");
      EXPECT_TRUE(n_left.wait_for(1));  // otherwise the pending call ends because this rank leaves
      // The first ends well over messages where rank 0 had sent its own before it left.
      expect_contains(thrown<PeerFailed>([&] {
                        other.barrier();
                        other.barrier();
                      }),
                      "the disk is full");
    }
  });
}

TEST_P(Conformance, typed_asynchronous_calls) {
  run([] {
    const auto n = static_cast<std::size_t>(get_world_size());
    std::vector<std::uint32_t> data(100, 1);
    std::vector<std::uint16_t> part(10, static_cast<std::uint16_t>(get_rank()));
    std::vector<std::uint16_t> all(10 * n);
    std::vector<std::uint16_t> parts(10 * n);
    std::array<bool, 3> flags = {get_rank() == 0, true, false};
    std::array<int, 1> highest = {get_rank()};
    std::vector<Work> works;
    works.push_back(all_reduce_async(data));
    works.push_back(all_reduce_async(highest, ReduceOp::max));
    works.push_back(broadcast_async(flags, 0));
    works.push_back(all_gather_async(part, all));
    works.push_back(all_to_all_async(all, parts));
    works.push_back(scatter_async(all, part, /*src=*/0));
    works.push_back(reduce_scatter_async(all, part, ReduceOp::max));
    works.push_back(reduce_async(data, /*dst=*/0, ReduceOp::max));
    works.push_back(barrier_async());
    works.back().wait();
    EXPECT_EQ(highest[0], get_world_size() - 1);
    EXPECT_EQ(data, std::vector<std::uint32_t>(100, static_cast<std::uint32_t>(n)));
    EXPECT_EQ(flags, (std::array<bool, 3>{true, true, false}));
    EXPECT_EQ(parts, std::vector<std::uint16_t>(10 * n, static_cast<std::uint16_t>(get_rank())));
    EXPECT_EQ(part, std::vector<std::uint16_t>(10, static_cast<std::uint16_t>(get_rank())));
    if (n > 1 && get_rank() < 2) {
      std::vector<float> message(5, static_cast<float>(get_rank()));
      Work work = get_rank() == 0 ? send_async(message, 1) : recv_async(message, 0);
      work.wait();
      EXPECT_EQ(message, std::vector<float>(5, 0.F));
    }
  });
}

}  // namespace
}  // namespace lockstep::test
