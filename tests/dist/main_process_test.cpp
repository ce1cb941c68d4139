#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <lockstep/lockstep.hpp>
#include <stdexcept>
#include <thread>

#include "dist/settings.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;

class MainProcessTest : public ::testing::TestWithParam<Setting> {
 protected:
  void run(const std::function<void()>& body) { run_as(GetParam(), body); }
};

INSTANTIATE_TEST_SUITE_P(Ranks, MainProcessTest, ::testing::ValuesIn(few_ranks()),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(MainProcessTest, master_only_runs_on_rank_0) {
  run([] {
    auto twice = master_only([](int value) { return 2 * value; });
    EXPECT_EQ(twice(21), get_rank() == 0 ? std::optional(42) : std::nullopt);
    int n_runs = 0;
    auto count = master_only([&n_runs] { ++n_runs; });
    static_assert(std::is_void_v<decltype(count())>);
    count();
    count();
    EXPECT_EQ(n_runs, get_rank() == 0 ? 2 : 0);

    const Group reversed = default_group().split(/*color=*/0, /*key=*/-get_rank());
    EXPECT_EQ(master_only([] { return 1; }, reversed)().has_value(),
              get_rank() == get_world_size() - 1);
  });
}

/// When each rank ran f, by rank.
std::vector<std::vector<std::int64_t>> times_of(std::int64_t mine) {
  return all_gather(std::array{mine});
}

std::int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

TEST_P(MainProcessTest, main_process_runs_first) {
  const SharedCount n_others;
  run([&] {
    const auto tids = all_gather(std::array{static_cast<std::int64_t>(::gettid())});
    std::int64_t began = 0;
    if (get_rank() != 0) n_others.raise();
    const std::int64_t ended = main_process_first([&] {
      began = now();
      if (get_rank() == 0) {
        EXPECT_TRUE(n_others.wait_for(get_world_size() - 1));
        // Who did not wait for rank 0 would begin before it sleeps.
        for (std::size_t r = 1; r < tids.size(); ++r) EXPECT_TRUE(wait_until_asleep(tids[r][0]));
      }
      return now();
    });
    const auto begins = times_of(began);
    const auto ends = times_of(ended);
    for (std::size_t r = 1; r < begins.size(); ++r) EXPECT_GE(begins[r][0], ends[0][0]);
    int n_runs = 0;
    local_main_process_first([&n_runs] { ++n_runs; });
    EXPECT_EQ(n_runs, 1);
    const Group reversed = default_group().split(/*color=*/0, /*key=*/-get_rank());
    EXPECT_EQ(main_process_first([&] { return reversed.rank(); }, reversed), reversed.rank());
  });
}

TEST_P(MainProcessTest, rank_0_throws_inside) {
  run([] {
    const auto work = [] {
      if (get_rank() == 0) throw std::logic_error("no disk");
      ADD_FAILURE() << "runs although rank 0 failed";
    };
    if (get_rank() == 0) {
      EXPECT_EQ(thrown<std::logic_error>([&] { main_process_first(work); }), "no disk");
    } else {
      const auto refused = thrown<PeerFailed>([&] { main_process_first(work); });
      expect_contains(refused, "main_process_first on group 'world'");
      expect_contains(refused, "main_process_test.cpp");
      expect_contains(refused, "rank 0 failed inside: no disk");
    }
    EXPECT_EQ(all_reduce_value(1), get_world_size());  // the group stays usable
  });
}

TEST_P(MainProcessTest, another_rank_throws_inside) {
  run([] {
    const int last = get_world_size() - 1;
    const auto work = [last] {
      if (get_rank() == last) throw std::logic_error("mine alone");
    };
    if (get_rank() == last) {
      EXPECT_THROW(main_process_first(work), std::logic_error);
    } else if (last > 0) {
      main_process_first(work);
    }
    EXPECT_EQ(all_reduce_value(1), get_world_size());
  });
}

TEST_P(MainProcessTest, collectives_inside_are_rejected) {
  run([] {
    const Group group = default_group();
    const Group other = group.duplicate();
    int value = 1;
    main_process_first([&] {
      expect_contains(thrown<UsageError>([] { barrier(); }), "called inside main_process_first");
      EXPECT_THROW(all_reduce_value(1), UsageError);
      EXPECT_THROW(broadcast_object(value), UsageError);
      EXPECT_THROW(group.duplicate(), UsageError);
      EXPECT_THROW(group.allocate(1), UsageError);
      EXPECT_THROW((void)group.barrier_async(), UsageError);
      EXPECT_EQ(get_rank(), group.rank());  // a question is none
    });
    if (get_world_size() > 1) {
      main_process_first([] { EXPECT_THROW(barrier(), UsageError); }, other);
    }
    barrier();
  });
}

TEST_P(MainProcessTest, the_last_handle_of_the_group_may_be_destroyed_inside) {
  run([] {
    Group group = default_group().duplicate();
    int n_runs = 0;
    const auto replace = [&] {
      group = Group();
      ++n_runs;
    };
    main_process_first(replace, group);
    EXPECT_EQ(n_runs, 1);
    barrier();
  });
}

TEST_P(MainProcessTest, nesting_is_rejected) {
  run([] {
    const Group other = default_group().duplicate();
    main_process_first([&other] {
      expect_contains(thrown<UsageError>([] { main_process_first([] {}); }),
                      "main_process_first on group");
      EXPECT_THROW(local_main_process_first([] {}), UsageError);
      if (get_world_size() > 1) {
        EXPECT_THROW(main_process_first([] {}, other), UsageError);
      }
    });
    local_main_process_first([] { EXPECT_THROW(main_process_first([] {}), UsageError); });
    barrier();
    main_process_first([] {});  // one after the other is fine
  });
}

TEST_P(MainProcessTest, the_hold_ends_with_an_exception) {
  run([] {
    EXPECT_ANY_THROW(main_process_first([] { throw 1; }));
    barrier();
  });
}

TEST(ControlTimeTest, long_work_outlasts_the_timeout_of_an_operation) {
  constexpr milliseconds kTimeout(1000);
  const auto work = [=] {
    if (get_rank() == 0) outlast(kTimeout);
  };
  run_ranks(3, [&] { main_process_first(work); }, {.timeout = kTimeout});
}

TEST(ControlTimeTest, explicit_limit) {
  const SharedCount given_up;
  run_ranks(2, [&](int rank) {
    const auto work = [&] { EXPECT_TRUE(given_up.wait_for(1)); };
    const auto call = [&] { main_process_first(work, default_group(), milliseconds(50)); };
    expect_contains(thrown<TimeoutError>(call), rank == 0 ? "" : "rank 0");
    given_up.raise();
  });
}

TEST(ControlTimeTest, rank_0_killed_inside) {
  const auto statuses = run_processes(3, [] {
    const auto work = [] {
      if (get_rank() == 0) ::kill(::getpid(), SIGKILL);
      FAIL() << "runs although rank 0 died";
    };
    const auto refused = thrown<PeerLost>([&] { main_process_first(work); });
    expect_contains(refused, "rank 0");
  });
  EXPECT_TRUE(WIFSIGNALED(statuses[0]));
  EXPECT_EQ(statuses[1], 0);
  EXPECT_EQ(statuses[2], 0);
}

}  // namespace
}  // namespace lockstep::test
