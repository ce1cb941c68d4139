#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <lockstep/engine.hpp>
#include <lockstep/lockstep.hpp>
#include <memory>
#include <source_location>
#include <string>
#include <thread>
#include <vector>

#include "group/async_groups.hpp"
#include "group/group_state.hpp"
#include "group/native_engine.hpp"
#include "support/expect.hpp"
#include "support/waiting.hpp"

namespace lockstep {
namespace {

using test::expect_contains;
using test::thrown;

TEST(GroupTest, solo_outside_a_world) {
  EXPECT_FALSE(is_distributed());
  EXPECT_EQ(get_rank(), 0);
  EXPECT_EQ(get_world_size(), 1);
  EXPECT_EQ(get_local_rank(), 0);
  EXPECT_EQ(get_local_size(), 1);
  EXPECT_EQ(get_backend(), std::nullopt);
  EXPECT_TRUE(is_main_process());
  EXPECT_EQ(get_dist_info().world_size, 1);
  barrier();
  destroy_dist();  // nothing to leave
  std::array<float, 2> data = {1, 2};
  all_reduce(data, ReduceOp::mean);
  EXPECT_EQ(data[1], 2);
}

/// Notices two threads inside it at once.
class OneCallEngine final : public Engine {
 public:
  explicit OneCallEngine(std::atomic<int>& n_overlaps) : n_overlaps_(n_overlaps) {}
  std::string_view name() const noexcept override { return "one call"; }
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  void run(const Call&) override {
    if (n_inside_.fetch_add(1) != 0) ++n_overlaps_;
    for (int i = 0; i < 100; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
    n_inside_.fetch_sub(1);
  }
  std::unique_ptr<Engine> split(const Call&, int, int) override { return nullptr; }
  std::unique_ptr<SharedMemory> allocate(const Call&) override { return nullptr; }
  void abandon(std::string_view) noexcept override {}
  void leave(std::string_view) noexcept override {}

 private:
  std::atomic<int>& n_overlaps_;
  std::atomic<int> n_inside_{0};
};

// Its own, and not the one of the posted call, which is the group's: a minute.
TEST(GroupTest, the_limit_of_a_call_covers_the_wait_for_posted_ones) {
  const test::SharedCount n_given_up;
  run_ranks(2, [&](int rank) {
    const Group group = default_group();
    if (rank == 1) {
      EXPECT_TRUE(n_given_up.wait_for(1));
      expect_contains(thrown<PeerFailed>([&] { group.barrier(); }),
                      "rank 0 failed: rank 0 waited 0.1 s for its own barrier, posted at "
                      "group_test.cpp:");
      return;
    }
    Work posted = group.barrier_async(std::chrono::seconds(20));
    expect_contains(thrown<TimeoutError>([&] { group.barrier(std::chrono::milliseconds(100)); }),
                    "rank 0 waited 0.1 s for its own barrier, posted at group_test.cpp:");
    EXPECT_THROW(posted.wait(), Error);
    EXPECT_THROW(group.barrier(), TimeoutError);
    n_given_up.raise();
  });
}

TEST(GroupTest, the_limit_of_a_posted_call_begins_when_it_is_posted) {
  const test::SharedCount n_passed;
  run_ranks(2, [&](int rank) {
    const Group group = default_group();
    if (rank == 1) {
      EXPECT_TRUE(n_passed.wait_for(1));
      group.barrier();
      EXPECT_THROW(group.barrier(), Error);
      return;
    }
    constexpr std::chrono::milliseconds kLimit(50);
    Work first = group.barrier_async();
    Work second = group.barrier_async(kLimit);
    const auto end = std::chrono::steady_clock::now() + kLimit;
    while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
    n_passed.raise();
    first.wait();
    expect_contains(thrown<TimeoutError>([&] { second.wait(); }),
                    "rank 0 spent the 0.05 s of this call's limit in earlier asynchronous calls");
  });
}

TEST(GroupTest, main_process_first_waits_for_posted_calls_as_long_as_its_limit) {
  const test::SharedCount n_given_up;
  run_ranks(2, [&](int rank) {
    const Group group = default_group();
    if (rank == 1) {
      EXPECT_TRUE(n_given_up.wait_for(1));
      EXPECT_THROW(group.barrier(), PeerFailed);
      return;
    }
    Work posted = group.barrier_async();
    expect_contains(thrown<TimeoutError>(
                        [&] { main_process_first([] {}, group, std::chrono::milliseconds(100)); }),
                    "waited 0.1 s for its own barrier, posted at group_test.cpp:");
    EXPECT_THROW(posted.wait(), Error);
    n_given_up.raise();
  });
}

/// A program that ends once it has waited has no call under way.
TEST(GroupTest, is_idle_once_its_last_posted_call_is_done) {
  std::atomic<int> n_overlaps{0};
  const auto group = std::make_shared<internal::GroupState>(
      std::make_unique<OneCallEngine>(n_overlaps), "world", std::chrono::seconds(60),
      /*recorder=*/nullptr, Check::light);
  const Call call{.op = Op::barrier, .where = std::source_location::current()};
  for (int i = 0; i < 20'000; ++i) {
    const auto work = group->post(call, {});
    while (!work->done()) {
    }
    ASSERT_TRUE(group->is_idle()) << "after call " << i;
  }
}

// The posted call's error is the one that names it.
TEST(GroupTest, a_rank_late_for_a_posted_call_is_named_where_the_next_call_waits_for_it) {
  const test::SharedCount n_given_up;
  run_ranks(3, [&](int rank) {
    const Group group = default_group();
    const std::chrono::milliseconds limit(300);
    if (rank == 2) {
      EXPECT_TRUE(n_given_up.wait_for(2));
      return;
    }
    Work posted = group.barrier_async(limit);
    expect_contains(thrown<TimeoutError>([&] { group.barrier(limit); }),
                    "waited 0.3 s for rank 2 of 3");
    EXPECT_THROW(posted.wait(), TimeoutError);
    n_given_up.raise();
  });
}

TEST(GroupTest, null_data) {
  const Group group;
  expect_contains(thrown<UsageError>([&] {
                    group.all_reduce({nullptr, 3, DType::f32});
                  }),
                  "data is null but has 3 elements");
  group.all_reduce({nullptr, 0, DType::f32});
}

TEST(GroupTest, roots_outside_the_group) {
  run_ranks(2, [] {
    const Group group = default_group();
    int value = 1;
    const Elements data{&value, 1, DType::i32};
    expect_contains(thrown<UsageError>([&] { group.broadcast(data, -1); }),
                    "src is -1; the group's ranks are 0 to 1");
    expect_contains(thrown<UsageError>([&] { group.reduce(data, 2); }), "dst is 2");
    expect_contains(thrown<UsageError>([&] { group.gather(data, {}, 7); }), "dst is 7");
    expect_contains(thrown<UsageError>([&] { group.scatter({}, data, -2); }), "src is -2");
    barrier();                                                             // the group stays usable
    const Group of_send = group.duplicate(), of_recv = group.duplicate();  // which these end
    expect_contains(thrown<UsageError>([&] { of_send.send(data, group.rank()); }),
                    "is this rank itself");
    expect_contains(thrown<UsageError>([&] { of_recv.recv(data, 9); }), "src is 9");
  });
}

TEST(GroupTest, bit_operations_on_floats) {
  const Group group;
  float value = 1;
  expect_contains(thrown<UsageError>([&] {
                    group.all_reduce({&value, 1, DType::f32}, ReduceOp::bxor);
                  }),
                  "bxor of f32: bit operations are for integers");
}

TEST(GroupTest, means_of_moments) {
  std::array<double, 4> sample{2, 0.5, 1, 0};
  const Elements data{sample.data(), 1, detail::kMoments};
  expect_contains(thrown<UsageError>([&] { Group().all_reduce(data, ReduceOp::mean); }),
                  "mean of moments: they have only a sum");
  Group().all_reduce(data);
}

TEST(GroupTest, sums_of_bool) {
  bool value = true;
  const Elements data{&value, 1, DType::boolean};
  expect_contains(thrown<UsageError>([&] { Group().all_reduce(data); }),
                  "sum of bool: use bor (any)");
  expect_contains(thrown<UsageError>([&] { Group().all_reduce(data, ReduceOp::mean); }),
                  "mean of bool");
  Group().all_reduce(data, ReduceOp::band);
}

TEST(GroupTest, element_type_that_does_not_exist) {
  run_ranks(2, [] {
    const Group group = default_group();
    std::array<char, 64> bytes{};
    const auto none = static_cast<DType>(99);
    const Elements data{bytes.data(), 1, none};
    const auto expect_refused = [](auto call) {
      expect_contains(thrown<UsageError>(call), "element type 99, which does not exist");
    };
    expect_refused([&] { group.all_reduce(data); });
    expect_refused([&] { group.reduce(data); });
    expect_refused([&] { group.broadcast(data); });
    expect_refused([&] { group.all_gather(data, {bytes.data() + 8, 2, none}); });
    expect_refused([&] { group.gather(data, {bytes.data() + 8, 2, none}); });
    expect_refused([&] { group.scatter({bytes.data() + 8, 2, none}, data); });
    expect_refused([&] { group.reduce_scatter({bytes.data() + 8, 2, none}, data); });
    expect_refused([&] { group.all_to_all({bytes.data(), 2, none}, {bytes.data() + 8, 2, none}); });
    expect_refused([&] { group.all_reduce({nullptr, 0, none}); });
    expect_refused([&] { static_cast<void>(group.all_reduce_async(data)); });
    barrier();                                                             // the group stays usable
    const Group of_send = group.duplicate(), of_recv = group.duplicate();  // which these end
    expect_refused([&] { of_send.send(data, 1 - group.rank()); });
    expect_refused([&] { of_recv.recv(data, 1 - group.rank()); });
  });
}

TEST(GroupTest, reduction_that_does_not_exist) {
  float value = 1;
  expect_contains(thrown<UsageError>([&] {
                    Group().all_reduce({&value, 1, DType::f32}, ReduceOp(99));
                  }),
                  "reduction 99 does not exist");
}

TEST(GroupTest, sizes_that_do_not_fit) {
  run_ranks(2, [] {
    std::vector<int> two(2);
    std::vector<int> three(3);
    std::vector<int> other(3);
    expect_contains(thrown<UsageError>([&] { all_gather(two, three); }),
                    "out has 3 elements, expected 4");
    expect_contains(thrown<UsageError>([&] { reduce_scatter(three, two); }),
                    "in has 3 elements, expected 4");
    expect_contains(thrown<UsageError>([&] { all_to_all(three, other); }),
                    "cannot be divided equally");
    std::vector<double> doubles(4);
    expect_contains(
        thrown<UsageError>([&] {
          default_group().all_gather({two.data(), 2, DType::i32}, {doubles.data(), 4, DType::f64});
        }),
        "in holds i32, out f64");
    const std::vector<std::size_t> counts = {1, 1, 1};
    expect_contains(thrown<UsageError>([&] {
                      default_group().all_gather({two.data(), 2, DType::i32},
                                                 {three.data(), 3, DType::i32}, counts);
                    }),
                    "counts has 3 entries");
    barrier();
  });
}

TEST(GroupTest, overlapping_buffers) {
  std::vector<int> data(4);
  expect_contains(
      thrown<UsageError>([&] { all_to_all(std::span<const int>(data), std::span<int>(data)); }),
      "in and out overlap");
}

TEST(GroupTest, split_negative_color) {
  expect_contains(thrown<UsageError>([] { static_cast<void>(Group().split(-1)); }), "color is -1");
}

TEST(GroupTest, allocate_more_than_any_memory) {
  expect_contains(thrown<UsageError>([] { static_cast<void>(Group().allocate(SIZE_MAX)); }),
                  "more than fit in memory");
}

TEST(GroupTest, two_threads_in_one_group) {
  run_ranks(2, [](int rank) {
    const Group group = default_group().duplicate();
    if (rank == 1) {
      barrier();  // until rank 0 has made its checks
      group.barrier();
      return;
    }
    std::atomic<pid_t> tid{0};
    std::thread inside([&] {
      tid = ::gettid();
      group.barrier();
    });
    // The refused call must be made while the other waits.
    EXPECT_TRUE(test::wait_until_asleep(tid));
    expect_contains(thrown<UsageError>([&] { group.barrier(); }),
                    "another thread is inside a call");
    barrier();
    inside.join();
  });
}

/// Rank 0 of 2, which takes no lists.
class BlocksEngine final : public Engine {
 public:
  explicit BlocksEngine(std::string& ended_with) : ended_with_(ended_with) {}
  std::string_view name() const noexcept override { return "blocks"; }
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 2; }
  void run(const Call&) override {}
  std::unique_ptr<Engine> split(const Call&, int, int) override { return nullptr; }
  std::unique_ptr<SharedMemory> allocate(const Call&) override { return nullptr; }
  void abandon(std::string_view reason) noexcept override { ended_with_ = reason; }
  void leave(std::string_view) noexcept override {}

 private:
  std::string& ended_with_;
};

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they end such a program
TEST(GroupTest, lists_for_which_there_is_no_memory) {
  std::string ended_with;
  const Group group(std::make_unique<BlocksEngine>(ended_with), "world", std::chrono::seconds(1));
  // Of addresses that nothing reads.
  constexpr std::size_t kCount = std::size_t{1} << 45U;
  const auto at = [](std::uintptr_t i) { return reinterpret_cast<void*>(i << 46U); };
  const std::vector<void*> outs = {at(1), at(2)};
  const Call call{.op = Op::all_gather, .count = kCount, .in = at(3), .outs = outs, .where = {}};
  expect_contains(thrown<SystemError>([&] { internal::NativeGroup::run(group, call, {}); }),
                  "no memory to pack the parts");
  expect_contains(ended_with, "no memory to pack the parts");
}
#endif

TEST(GroupTest, two_threads_that_call_at_the_same_moment_are_never_both_inside) {
  constexpr int kRefused = 10'000;  // so often did one come while the other was inside
  std::atomic<int> n_overlaps{0};
  const Group group(std::make_unique<OneCallEngine>(n_overlaps), "world", std::chrono::seconds(60));
  std::atomic<int> n_refused{0};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const auto call = [&] {
    while (n_refused < kRefused && n_overlaps == 0 && std::chrono::steady_clock::now() < end) {
      try {
        group.barrier();
      } catch (const UsageError&) {
        ++n_refused;
      }
    }
  };
  std::thread other(call);
  call();
  other.join();
  ASSERT_EQ(n_overlaps, 0) << "after " << n_refused << " refusals";
  EXPECT_GE(n_refused, kRefused) << "the threads hardly ever met";
}

/// Its calls wait until they are abandoned, and abandon() until it may return.
class AbandonedEngine final : public Engine {
 public:
  struct Events {
    std::atomic<bool> is_running{false};
    std::atomic<bool> is_abandoned{false};
    std::atomic<bool> is_destroyed{false};
    std::function<void()> on_abandon = [] {};
  };
  explicit AbandonedEngine(Events& events) : events_(events) {}
  ~AbandonedEngine() override { events_.is_destroyed = true; }
  AbandonedEngine(const AbandonedEngine&) = delete;
  AbandonedEngine& operator=(const AbandonedEngine&) = delete;
  std::string_view name() const noexcept override { return "abandoned"; }
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 2; }
  void run(const Call& call) override {
    events_.is_running = true;
    test::wait_until([&] { return events_.is_abandoned.load(); });
    throw PeerFailed(context_of(call, 0), "abandoned");
  }
  std::unique_ptr<Engine> split(const Call&, int, int) override { return nullptr; }
  std::unique_ptr<SharedMemory> allocate(const Call&) override { return nullptr; }
  void abandon(std::string_view) noexcept override {
    events_.on_abandon();
    events_.is_abandoned = true;
  }
  void leave(std::string_view) noexcept override {}

 private:
  Events& events_;
};

std::shared_ptr<internal::GroupState> abandoned_group(AbandonedEngine::Events& events) {
  return std::make_shared<internal::GroupState>(std::make_unique<AbandonedEngine>(events), "world",
                                                std::chrono::seconds(60), nullptr, Check::light);
}

TEST(GroupTest, an_engine_is_not_replaced_while_another_thread_abandons_it) {
  AbandonedEngine::Events events;
  std::atomic<bool> is_abandoning{false};
  std::atomic<bool> was_destroyed{false};
  const auto group = abandoned_group(events);
  std::thread exits;
  std::atomic<pid_t> exits_tid{0};
  events.on_abandon = [&] {
    is_abandoning = true;
    // Until the other thread waits, or has done what it must not.
    test::wait_until(
        [&] { return events.is_destroyed || (exits_tid != 0 && test::is_asleep(exits_tid)); });
    was_destroyed = events.is_destroyed.load();
  };
  exits = std::thread([&] {
    test::wait_until([&] { return is_abandoning.load(); });
    exits_tid = ::gettid();
    group->retire();
  });
  group->abandon("an exception");
  exits.join();
  EXPECT_FALSE(was_destroyed);
  EXPECT_TRUE(events.is_destroyed);
}

TEST(GroupTest, a_group_that_is_added_meanwhile_hides_none_that_is_abandoned) {
  std::array<AbandonedEngine::Events, 3> events;
  std::vector<std::shared_ptr<internal::GroupState>> groups;
  internal::AsyncGroups async_groups;
  AbandonedEngine::Events of_former;
  auto former = abandoned_group(of_former);
  async_groups.add(former);
  for (auto& each : events) groups.push_back(abandoned_group(each));
  const Call call{.op = Op::barrier, .where = std::source_location::current()};
  std::vector<std::shared_ptr<internal::WorkState>> works;
  for (std::size_t i = 0; i < 2; ++i) {
    works.push_back(groups[i]->post(call, {}));
    async_groups.add(groups[i]);
    ASSERT_TRUE(test::wait_until([&] { return events[i].is_running.load(); }));
  }
  former.reset();
  events[0].on_abandon = [&] { async_groups.add(groups[2]); };
  async_groups.abandon_pending("an exception");
  EXPECT_TRUE(events[0].is_abandoned);
  EXPECT_TRUE(events[1].is_abandoned);
  for (std::size_t i = 0; i < 2; ++i) {
    events[i].is_abandoned = true;  // else this test never ends
    works[i]->wait_until_done();
  }
}

TEST(GroupTest, handles_compare_by_group) {
  const Group a;
  const Group b = a;
  EXPECT_EQ(a, b);
  EXPECT_NE(a, a.duplicate());
}

TEST(GroupTest, errors_name_the_callers_line) {
  int line = 0;
  std::vector<float> data(1);
  try {
    line = __LINE__ + 1;
    broadcast(data, 5);
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_EQ(error.context().where.line(), line);
    expect_contains(error.what(), "group_test.cpp:" + std::to_string(line));
  }
}

TEST(WorkTest, failure_is_rethrown_and_the_group_is_dead) {
  run_ranks(2, [](int rank) {
    const Group group = default_group().duplicate();
    if (rank == 1) return;  // leaves its peer alone
    float value = 0;
    Work work = group.all_reduce_async({&value, 1, DType::f32});
    EXPECT_THROW(work.wait(), PeerLost);
    EXPECT_THROW(work.wait(), PeerLost);
    EXPECT_TRUE(work.done());
    EXPECT_THROW(group.barrier(), PeerLost);
  });
}

TEST(WorkTest, a_work_without_a_wait_does_not_hide_its_failure) {
  run_ranks(2, [](int rank) {
    const Group group = default_group().duplicate();
    if (rank == 1) return;
    group.barrier_async().detach();
    EXPECT_THROW(group.barrier(), PeerLost);
  });
}

TEST(WorkTest, waits_when_its_last_copy_is_destroyed) {
  run_ranks(2, [](int rank) {
    const Group group = default_group().duplicate();
    std::vector<std::int64_t> data(100'000, 1);
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));  // not yet
    {
      const Work work = group.all_reduce_async({data.data(), data.size(), DType::i64});
      Work copy = work;
      copy = Work();
    }
    EXPECT_EQ(data.front(), 2);
    EXPECT_EQ(data.back(), 2);
  });
}

TEST(WorkTest, detached_it_does_not_wait) {
  run_ranks(2, [](int rank) {
    const Group group = default_group().duplicate();
    if (rank == 0) {
      Work work = group.barrier_async();
      const Work copy = work;
      work.detach();
    }
    barrier();  // which rank 1 comes to before that of the other group
    group.barrier();
    if (rank == 1) group.barrier();
  });
}

TEST(WorkTest, cannot_be_posted_while_another_thread_is_inside_a_call) {
  run_ranks(2, [](int rank) {
    const Group group = default_group().duplicate();
    if (rank == 1) {
      barrier();
      group.barrier();
      return;
    }
    std::atomic<pid_t> tid{0};
    std::thread inside([&] {
      tid = ::gettid();
      group.barrier();
    });
    EXPECT_TRUE(test::wait_until_asleep(tid));  // as in two_threads_in_one_group
    expect_contains(thrown<UsageError>([&] { static_cast<void>(group.barrier_async()); }),
                    "another thread is inside a call");
    barrier();
    inside.join();
  });
}

TEST(WorkTest, an_exception_does_not_wait_for_calls_under_way) {
  std::string text_at_peer;
  const auto body = [&](int rank) {
    const Group group = default_group().duplicate();
    if (rank == 0) {
      try {
        barrier();
      } catch (const PeerFailed& error) {
        text_at_peer = error.text();
      }
      expect_contains(thrown<PeerFailed>([&] { group.barrier(); }),
                      "rank 1 failed: it left because");
      return;
    }
    const Work work = group.barrier_async();
    throw std::runtime_error("out of paper");
  };
  EXPECT_THROW(run_ranks(2, body, {.timeout = std::chrono::seconds(60)}), std::runtime_error);
  expect_contains(text_at_peer, "rank 1 failed: out of paper");
}

TEST(WorkTest, usage_errors_come_at_the_call) {
  EXPECT_THROW(static_cast<void>(Group().broadcast_async({}, 3)), UsageError);
  Work nothing;
  EXPECT_TRUE(nothing.done());
  nothing.wait();
}

}  // namespace
}  // namespace lockstep
