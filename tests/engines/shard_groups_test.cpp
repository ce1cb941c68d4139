// NativeGroup::divide: groups in which a rank is several members, over every engine.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "group/native_engine.hpp"
#include "support/expect.hpp"
#include "support/ranks.hpp"
#include "support/tree.hpp"

namespace lockstep {
namespace {

using test::expect_contains;
using test::Form;
using test::Setting;
using test::thrown;

constexpr int kShards = 8;

/// Consecutive shards, as equal as possible.
std::vector<int> counts_of(int n_ranks) {
  std::vector<int> counts;
  for (int r = 0; r < n_ranks; ++r) {
    counts.push_back(kShards * (r + 1) / n_ranks - kShards * r / n_ranks);
  }
  return counts;
}

/// Calls body for each shard of this rank on a thread of its own, the first on this one.
void on_shards(const Group& group, const std::vector<int>& counts,
               const std::function<void(const Group&)>& body) {
  const std::vector<Group> mine =
      internal::NativeGroup::divide(group, counts, std::source_location::current());
  ASSERT_EQ(mine.size(), static_cast<std::size_t>(counts[static_cast<std::size_t>(group.rank())]));
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < mine.size(); ++i) {
    threads.emplace_back([&body, &one = mine[i]] { body(one); });
  }
  body(mine.front());
  for (std::thread& thread : threads) thread.join();
}

template <class T>
Elements elements(std::vector<T>& values) {
  return {values.data(), values.size(), kDTypeOf<T>};
}
template <class T>
ConstElements input(const std::vector<T>& values) {
  return {values.data(), values.size(), kDTypeOf<T>};
}

/// Of one shard; sums of them are rounded, so they show the order of additions.
std::vector<float> values_of(int shard, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = 1.0F / static_cast<float>(3 + shard) + static_cast<float>(i % 1013) * 1e3F;
  }
  return values;
}

/// Of all shards, in the order of the tree.
std::vector<float> sum_of_all(std::size_t count) {
  std::vector<std::vector<float>> all;
  for (int s = 0; s < kShards; ++s) all.push_back(values_of(s, count));
  return test::combined_in_tree(all, [](std::vector<float> a, const std::vector<float>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  });
}

void expect_reductions_in_the_tree(const Group& shards, std::size_t count) {
  const std::vector<float> sum = sum_of_all(count);
  const std::vector<float> mine = values_of(shards.rank(), count);
  std::vector<float> values = mine;
  shards.all_reduce(elements(values));
  EXPECT_EQ(values, sum);
  for (const int root : {0, kShards - 2}) {
    values = mine;
    shards.reduce(elements(values), root);
    if (shards.rank() == root) {
      EXPECT_EQ(values, sum);
    }
  }
  const std::size_t n_whole = count / kShards * kShards;
  std::vector<float> part(count / kShards);
  shards.reduce_scatter(ConstElements(mine.data(), n_whole, DType::f32), elements(part));
  const auto begin = sum.begin() + shards.rank() * static_cast<std::ptrdiff_t>(part.size());
  EXPECT_EQ(part, std::vector<float>(begin, begin + static_cast<std::ptrdiff_t>(part.size())));
}

void expect_moved(const Group& shards, std::size_t count) {
  const int rank = shards.rank();
  std::vector<std::int64_t> mine(count), all(count * kShards), expected(all.size());
  std::iota(expected.begin(), expected.end(), 0);
  const auto part_of = [&](int r) { return expected.data() + static_cast<std::size_t>(r) * count; };
  std::copy_n(part_of(rank), count, mine.begin());
  shards.all_gather(input(mine), elements(all));
  EXPECT_EQ(all, expected);
  for (const int root : {0, 3, kShards - 1}) {
    std::vector<std::int64_t> gathered(rank == root ? all.size() : 0), part = mine;
    shards.gather(input(mine), elements(gathered), root);
    if (rank == root) {
      EXPECT_EQ(gathered, expected);
    }
    shards.broadcast(elements(part), root);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), part_of(root)));
    shards.scatter(input(expected), elements(part), root);
    EXPECT_EQ(part, mine);
  }
  std::vector<std::int64_t> received(all.size());
  shards.all_to_all(input(expected), elements(received));
  for (int r = 0; r < kShards; ++r) {
    EXPECT_TRUE(std::equal(mine.begin(), mine.end(),
                           received.begin() + r * static_cast<std::ptrdiff_t>(count)));
  }
  shards.barrier();
}

class ShardGroupsTest : public ::testing::TestWithParam<Setting> {
 protected:
  static void on_all(const std::function<void(const Group&)>& body) {
    test::run_as(GetParam(), [&body] {
      const Group world = default_group();
      on_shards(world, counts_of(world.size()), [&body](const Group& shards) {
        EXPECT_EQ(shards.size(), kShards);
        body(shards);
        const Group twin = shards.duplicate();
        EXPECT_EQ(twin.rank(), shards.rank());
        body(twin);
      });
      world.barrier();
    });
  }
};

TEST_P(ShardGroupsTest, reduce_in_the_order_of_the_tree_over_shards) {
  on_all([](const Group& shards) {
    for (const std::size_t count : {1, 8, 1000, 300'000}) {
      expect_reductions_in_the_tree(shards, count);
    }
  });
}

TEST_P(ShardGroupsTest, move_data_in_the_order_of_shards) {
  on_all([](const Group& shards) {
    for (const std::size_t count : {1, 700, 20'000}) expect_moved(shards, count);
  });
}

TEST_P(ShardGroupsTest, an_abandoned_shard_ends_the_group_of_all) {
  test::run_as(GetParam(), [] {
    const Group world = default_group();
    on_shards(world, counts_of(world.size()), [](const Group& shards) {
      shards.barrier();
      if (shards.rank() == kShards - 1) return shards.abandon("it has no more");
      std::vector<float> values(4);
      expect_contains(thrown<EngineError>([&] { shards.all_reduce(elements(values)); }),
                      {"rank 7", "it has no more"});
    });
    world.barrier();
  });
}

std::string name_of(const ::testing::TestParamInfo<Setting>& info) {
  return test::name_of(info.param);
}
INSTANTIATE_TEST_SUITE_P(Engines, ShardGroupsTest,
                         ::testing::Values(Setting{Form::solo, 1}, Setting{Form::threads, 3},
                                           Setting{Form::processes, 2}, Setting{Form::hosts, 2},
                                           Setting{Form::hosts, 3}, Setting{Form::hosts, 4},
                                           Setting{Form::hosts, 5}, Setting{Form::messages, 2},
                                           Setting{Form::messages, 3}),
                         name_of);

TEST(ShardGroupsOverHostsTest, what_only_one_host_can_do_is_refused) {
  test::run_as({Form::messages, 2}, [] {
    const Group world = default_group();
    on_shards(world, {2, 2}, [](const Group& shards) {
      std::vector<float> values(4);
      const int peer = (shards.rank() + 2) % 4;
      expect_contains(thrown<UsageError>([&] { shards.send(elements(values), peer); }),
                      "shards send no messages to those of another host");
    });
    on_shards(world, {2, 2}, [](const Group& shards) {
      expect_contains(thrown<UsageError>([&] { (void)shards.split(shards.rank() % 2); }),
                      "cannot be split into other groups");
      expect_contains(thrown<UsageError>([&] { (void)shards.split(0, -shards.rank() - 1); }),
                      "cannot be split into other groups");
    });
  });
}

}  // namespace
}  // namespace lockstep
