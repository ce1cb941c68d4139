#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <span>
#include <thread>
#include <vector>

#include "support/expect.hpp"
#include "support/ranks.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep {
namespace default_group_test {
namespace {

using test::expect_contains;
using test::in_a_fork;
using test::thrown;

template <class F>
void on_another_thread(F body) {
  std::thread thread(body);
  thread.join();
}

void expect_all_zero(const std::vector<int>& statuses) {
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

/// The world's first call, which makes the groups of its hosts, is the program's too.
TEST(DefaultGroupTest, the_split_into_hosts_has_no_line_of_the_library) {
  std::string text;
  test::run_as({test::Form::hosts, 4}, [&text] {
    if (get_rank() == 2) return;
    try {
      barrier();
    } catch (const Error& error) {
      if (get_rank() == 0) text = error.what();  // on the host of rank 2
    }
  });
  expect_contains(text, "split #1 at ranks.cpp");
}

// --- which group ---------------------------------------------------------------------------------

TEST(DefaultGroupTest, every_thread_of_a_rank_has_the_world) {
  expect_all_zero(test::run_processes(2, [] {
    const int rank = get_rank();
    on_another_thread([rank] {
      EXPECT_TRUE(is_distributed());
      EXPECT_EQ(get_world_size(), 2);
      EXPECT_EQ(get_rank(), rank);
      EXPECT_EQ(get_local_size(), 2);
      EXPECT_EQ(is_main_process(), rank == 0);
      EXPECT_EQ(all_reduce_value(1), 2);
      expect_contains(thrown<UsageError>([] { init_dist(); }), "already belongs to a world");
    });
    EXPECT_EQ(all_reduce_value(1), 2);
    // One that began before destroy_dist, and one after.
    on_another_thread([] { destroy_dist(); });
    EXPECT_FALSE(is_distributed());
    EXPECT_EQ(get_world_size(), 1);
    on_another_thread([] { EXPECT_EQ(get_world_size(), 1); });
  }));
}

TEST(DefaultGroupTest, a_world_joined_on_another_thread_outlives_it) {
  expect_all_zero(test::run_processes(2, [] {
    destroy_dist();
    ::unsetenv("LOCKSTEP_SEGMENT");
    ::unsetenv("RANK");
    ::unsetenv("WORLD_SIZE");
    ::unsetenv("LOCAL_RANK");
    ::unsetenv("LOCAL_WORLD_SIZE");
    on_another_thread([] { init_dist({.launcher = Launcher::none}); });
    EXPECT_TRUE(is_distributed());
    EXPECT_EQ(get_world_size(), 1);
  }));
}

TEST(DefaultGroupTest, non_rank_thread_needs_a_group) {
  run_ranks(2, [](int rank) {
    const Group group = default_group();
    on_another_thread([&group, rank] {
      EXPECT_TRUE(is_distributed());
      int line = 0;
      const std::string text = thrown<UsageError>([&] {
        line = __LINE__ + 1;
        static_cast<void>(get_rank());
      });
      expect_contains(text, "GroupScope");
      expect_contains(text, "default_group_test.cpp:" + std::to_string(line));
      expect_contains(thrown<UsageError>([] { barrier(); }), "not a rank of run_ranks");
      expect_contains(thrown<UsageError>([] { static_cast<void>(get_local_rank()); }),
                      "local_group");
      expect_contains(thrown<UsageError>([] { init_dist(); }), "run_ranks");
      expect_contains(thrown<UsageError>([] { destroy_dist(); }),
                      "destroy_dist on the rank's own thread");
      {
        const GroupScope scope(group);
        EXPECT_EQ(get_rank(), rank);
        EXPECT_EQ(all_reduce_value(1), 2);
        {
          const GroupScope alone{Group()};
          EXPECT_EQ(get_world_size(), 1);
        }
        EXPECT_EQ(get_world_size(), 2);
      }
      expect_contains(thrown<UsageError>([] { barrier(); }), "GroupScope");
    });
    EXPECT_EQ(all_reduce_value(1), 2);
  });
  EXPECT_FALSE(is_distributed());
  EXPECT_EQ(get_world_size(), 1);
}

TEST(DefaultGroupTest, a_scope_goes_before_the_world) {
  run_ranks(2, [](int rank) {
    const Group alone = default_group().split(rank);
    const GroupScope scope(alone);
    EXPECT_EQ(get_world_size(), 1);
    EXPECT_EQ(get_local_size(), 2);
  });
}

TEST(DefaultGroupTest, a_rank_of_run_ranks_that_left_is_alone) {
  run_ranks(2, [](int rank) {
    EXPECT_EQ(all_reduce_value(rank), 1);
    destroy_dist();
    EXPECT_FALSE(is_distributed());
    EXPECT_EQ(get_world_size(), 1);
    EXPECT_EQ(get_local_size(), 1);
    EXPECT_EQ(get_backend(), std::nullopt);
    EXPECT_EQ(all_reduce_value(3), 3);
    expect_contains(thrown<UsageError>([] { init_dist(); }), "run_ranks");
    destroy_dist();  // nothing more
  });
}

TEST(DefaultGroupTest, the_process_keeps_its_world_while_run_ranks_is_at_work) {
  expect_all_zero(test::run_processes(2, [] {
    run_ranks(2, [](int rank) {
      if (rank == 0) {
        on_another_thread(
            [] { expect_contains(thrown<UsageError>([] { destroy_dist(); }), "run_ranks"); });
      }
      destroy_dist();
      EXPECT_EQ(get_world_size(), 1);  // not the process's either: two threads of it would call
      EXPECT_FALSE(is_distributed());
    });
    EXPECT_TRUE(is_distributed());
    EXPECT_EQ(all_reduce_value(1), 2);
    destroy_dist();
    EXPECT_FALSE(is_distributed());
  }));
}

// --- init_dist forgotten -------------------------------------------------------------------------

TEST(DefaultGroupTest, a_rank_that_never_called_init_dist) {
  const int status = in_a_fork([] {
    ::setenv("RANK", "1", 1);
    ::setenv("WORLD_SIZE", "2", 1);
    ::setenv("LOCAL_RANK", "1", 1);
    ::setenv("LOCAL_WORLD_SIZE", "2", 1);
    on_another_thread([] {  // this one's solo group may be there already
      EXPECT_FALSE(is_distributed());
      for (int i = 0; i < 2; ++i) {
        const std::string text = thrown<UsageError>([] { static_cast<void>(get_world_size()); });
        expect_contains(text, "never called init_dist");
        expect_contains(text, "WORLD_SIZE=2, RANK=1 (torchrun)");
        expect_contains(text, "init_dist with the launcher none");
      }
      expect_contains(thrown<UsageError>([] { static_cast<void>(get_local_rank()); }),
                      "never called");
      EXPECT_EQ(Group().size(), 1);  // asked for by name
      init_dist({.launcher = Launcher::none});
      EXPECT_EQ(get_world_size(), 1);
      EXPECT_EQ(all_reduce_value(3), 3);
      destroy_dist();
      EXPECT_EQ(get_world_size(), 1);
    });
  });
  EXPECT_EQ(status, 0);
}

TEST(DefaultGroupTest, an_environment_of_one_rank_is_alone) {
  const int status = in_a_fork([] {
    ::setenv("RANK", "0", 1);
    ::setenv("WORLD_SIZE", "1", 1);
    on_another_thread([] { EXPECT_EQ(get_world_size(), 1); });
  });
  EXPECT_EQ(status, 0);
}

// --- the program's end ---------------------------------------------------------------------------

/// A global's destructor, which calls after the main thread's thread-locals are gone.
struct CallsAtExit {
  int rank = 0;
  int size = 1;
  ~CallsAtExit() {
    if (get_rank() != rank || get_world_size() != size) ::_exit(5);
    try {
      barrier();
      if (size > 1) ::_exit(6);
    } catch (const UsageError& error) {
      if (std::string(error.what()).find("the program is ending") == std::string::npos) ::_exit(7);
    }
  }
};

TEST(DefaultGroupTest, destructors_of_globals_may_call_alone) {
  const int status = in_a_fork([] {
    static CallsAtExit calls;
    barrier();
    std::exit(0);
  });
  EXPECT_EQ(status, 0);
}

TEST(DefaultGroupTest, destructors_of_globals_may_call_in_a_world) {
  expect_all_zero(test::run_processes(2, [] {
    static CallsAtExit calls;
    calls.rank = get_rank();
    calls.size = get_world_size();
    barrier();
    std::exit(0);
  }));
}

TEST(DefaultGroupTest, asynchronous_calls_end_before_the_program_does) {
  expect_all_zero(test::run_processes(2, [] {
    constexpr int kCalls = 2'000;
    // Never destroyed: the calls read the one, and the destructor of the other would wait for them.
    static auto& data = *new std::vector<std::int64_t>(kCalls * 100, 1);
    static const Group& group = *new Group(default_group().duplicate());
    for (int i = 0; i < kCalls; ++i) {
      const std::span<std::int64_t> part(data.data() + i * 100, 100);
      if (get_rank() == 1) {
        all_reduce(part, ReduceOp::sum, group);
        EXPECT_EQ(part[99], 2);
      } else {
        all_reduce_async(part, ReduceOp::sum, group).detach();
      }
    }
    if (get_rank() == 0) std::exit(0);
  }));
}

/// Together for longer than a rank that exits waits for one of them.
TEST(DefaultGroupTest, asynchronous_calls_of_a_slow_peer_end_before_the_program_does) {
  expect_all_zero(test::run_processes(2, [] {
    constexpr int kCalls = 10;
    static auto& data = *new std::vector<std::int64_t>(kCalls, 1);
    static const Group& group = *new Group(default_group().duplicate());
    for (std::int64_t& value : data) {
      if (get_rank() == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(150));
        all_reduce(std::span(&value, 1), ReduceOp::sum, group);
        EXPECT_EQ(value, 2);
      } else {
        all_reduce_async(std::span(&value, 1), ReduceOp::sum, group).detach();
      }
    }
    if (get_rank() == 0) std::exit(0);
  }));
}

// --- forks ---------------------------------------------------------------------------------------

TEST(DefaultGroupTest, fork_is_not_a_rank) {
  const test::TemporaryFolder folder;
  ::setenv("LOCKSTEP_RECORD_DIR", folder.path().c_str(), 1);
  expect_all_zero(test::run_processes(2, [] {
    const Group mine = default_group().duplicate();
    const Group posted = default_group().duplicate();
    const SharedBuffer buffer = mine.allocate(100);
    Work work;
    if (get_rank() == 0) work = posted.barrier_async();  // has a thread, and is under way
    const int calls = in_a_fork([&] {
      expect_contains(thrown<UsageError>([] { barrier(); }), "is a fork of a rank");
      expect_contains(thrown<UsageError>([&] { mine.barrier(); }), "is a fork of a rank");
      expect_contains(thrown<UsageError>([&] { static_cast<void>(posted.barrier_async()); }),
                      "a fork");
      EXPECT_EQ(get_world_size(), 2);  // still known
    });
    EXPECT_EQ(calls, 0);
    EXPECT_EQ(in_a_fork([] { std::exit(0); }), 0);
    EXPECT_EQ(in_a_fork([&] {
                const Group copy = mine;
                destroy_dist("a copy");
                std::exit(0);
              }),
              0);
    EXPECT_EQ(in_a_fork([] {
                std::set_terminate(std::get_terminate());
                // No thread: ThreadSanitizer ends a fork of a threaded process that starts one.
                const std::function<void()> fail = [] { throw std::runtime_error("in a copy"); };
                [&fail]() noexcept { fail(); }();
              }),
              128 + SIGABRT);
    EXPECT_EQ(all_reduce_value(1), 2);  // the ranks go on
    if (get_rank() == 1) posted.barrier();
    work.wait();
    mine.barrier();
    barrier();
  }));
  ::unsetenv("LOCKSTEP_RECORD_DIR");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(DefaultGroupTest, a_fork_of_a_process_with_rank_threads_has_none) {
  run_ranks(2, [](int rank) {
    barrier();
    if (rank == 0) {
      on_another_thread([] {
        EXPECT_EQ(in_a_fork([] {
                    EXPECT_FALSE(is_distributed());
                    EXPECT_EQ(get_world_size(), 1);
                    init_dist({.launcher = Launcher::none});
                    EXPECT_TRUE(is_distributed());
                    destroy_dist();
                    EXPECT_FALSE(is_distributed());
                  }),
                  0);
      });
      EXPECT_EQ(in_a_fork([] {
                  EXPECT_EQ(get_world_size(), 2);  // still known
                  expect_contains(thrown<UsageError>([] { barrier(); }), "is a fork of a rank");
                  destroy_dist();
                  EXPECT_FALSE(is_distributed());
                  EXPECT_EQ(get_world_size(), 1);
                }),
                0);
    }
    EXPECT_EQ(all_reduce_value(1), 2);  // the ranks go on
  });
}

// --- limits --------------------------------------------------------------------------------------

TEST(InitTimeoutTest, is_positive_and_cut_to_what_clocks_count) {
  const auto alone = [](std::chrono::milliseconds timeout) {
    init_dist({.launcher = Launcher::none, .timeout = timeout});
    const auto limit = default_group().timeout();
    destroy_dist();
    return limit;
  };
  EXPECT_EQ(in_a_fork([&] {
              const auto longest = alone(std::chrono::milliseconds::max());
              EXPECT_EQ(longest, Timeout::never().or_else({}));
              const auto in_ns = std::chrono::nanoseconds(longest);
              EXPECT_GT(std::chrono::steady_clock::now() + in_ns, std::chrono::steady_clock::now());
              EXPECT_EQ(alone(std::chrono::seconds(7)), std::chrono::seconds(7));
              for (const int bad : {0, -1, -100'000}) {
                expect_contains(thrown<UsageError>([&] { alone(std::chrono::milliseconds(bad)); }),
                                "the timeout is " + std::to_string(bad) + " ms");
              }
            }),
            0);
}

TEST(InitTimeoutTest, the_same_for_run_ranks) {
  expect_contains(
      thrown<UsageError>([] { run_ranks(2, [] {}, {.timeout = std::chrono::milliseconds(-5)}); }),
      "the timeout is -5 ms");
  run_ranks(2,
            [](int rank) {
              if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
              barrier();
              const Group half = default_group().duplicate();
              half.barrier(std::chrono::milliseconds::max());
              EXPECT_EQ(all_reduce_value(1, ReduceOp::sum, half, std::chrono::hours::max()), 2);
            },
            {.timeout = std::chrono::milliseconds::max()});
}

}  // namespace
}  // namespace default_group_test
}  // namespace lockstep
