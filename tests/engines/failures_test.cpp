// Ranks that disagree, are late, leave, throw or die: which error every rank gets.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <lockstep/lockstep.hpp>
#include <stdexcept>

#include "engines/shared/bootstrap/job.hpp"
#include "support/expect.hpp"
#include "support/ranks.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// The process or thread of each rank.
std::vector<std::vector<int>> thread_of_each_rank() {
  return all_gather(std::vector<int>{::gettid()});
}

class Failures : public ::testing::TestWithParam<Setting> {
 protected:
  void run(const std::function<void()>& body) { run_as(GetParam(), body, seconds(60)); }
};

INSTANTIATE_TEST_SUITE_P(Engines, Failures,
                         ::testing::Values(Setting{Form::threads, 3}, Setting{Form::processes, 3},
                                           Setting{Form::threads, 2}, Setting{Form::processes, 2}),
                         [](const auto& setting) { return name_of(setting.param); });

class FailuresOfThree : public Failures {};
INSTANTIATE_TEST_SUITE_P(Engines, FailuresOfThree,
                         ::testing::Values(Setting{Form::threads, 3}, Setting{Form::processes, 3}),
                         [](const auto& setting) { return name_of(setting.param); });

TEST_P(Failures, different_operations) {
  run([] {
    float value = 1;
    const Group group = default_group();
    const std::string text = thrown<MismatchError>([&] {
      if (group.rank() == 1) {
        group.barrier();
      } else {
        group.all_reduce({&value, 1, DType::f32}, ReduceOp::max);
      }
    });
    expect_contains(text, "\n  1     barrier         -     -           -     -");
    expect_contains(text, group.size() == 2
                              ? "\n  0     all_reduce      f32   1           -     max"
                              : "\n  0, 2  all_reduce      f32   1           -     max");
    expect_contains(text, "failures_test.cpp:");
    // Every later call throws the same error.
    EXPECT_EQ(thrown<MismatchError>([&] { group.barrier(); }), text);
  });
}

TEST_P(Failures, different_counts_types_roots_and_reductions) {
  run([] {
    const Group world = default_group();
    const bool odd = world.rank() == 1;
    std::vector<double> data(100);
    const auto mismatch = [&](const char* part, const auto& call) {
      const Group group = world.duplicate();
      expect_contains(thrown<MismatchError>([&] { call(group); }), part);
    };
    mismatch("  8  ", [&](const Group& group) {
      group.all_reduce({data.data(), odd ? 8U : 4U, DType::f64});
    });
    mismatch("i64", [&](const Group& group) {
      group.all_reduce({data.data(), 4, odd ? DType::i64 : DType::f64});
    });
    mismatch("broadcast", [&](const Group& group) {
      group.broadcast({data.data(), 4, DType::f64}, odd ? 1 : 0);
    });
    mismatch("product", [&](const Group& group) {
      group.all_reduce({data.data(), 4, DType::f64}, odd ? ReduceOp::product : ReduceOp::sum);
    });
    mismatch("allocate",
             [&](const Group& group) { static_cast<void>(group.allocate(odd ? 100 : 200)); });
    const std::vector<std::size_t> counts(static_cast<std::size_t>(world.size()), 1);
    std::vector<std::size_t> others = counts;
    others[0] += odd ? 1 : 0;
    std::vector<double> all(counts.size() + (odd ? 1U : 0U));
    mismatch("all_gather", [&](const Group& group) {
      group.all_gather({data.data(), 1, DType::f64}, {all.data(), all.size(), DType::f64}, others);
    });
    barrier();  // the world is none of these groups
  });
}

// The signatures of f32 and f64, and these counts, differ in the same bit.
TEST_P(Failures, a_type_and_a_count_that_differ_alike) {
  run([] {
    std::vector<double> data(1000);
    const bool odd = get_rank() == 1;
    const std::string text = thrown<MismatchError>([&] {
      default_group().all_reduce({data.data(), odd ? 744U : 1000U, odd ? DType::f64 : DType::f32});
    });
    expect_contains(text, "\n  1     all_reduce      f64   744");
  });
}

// Without `full` it would meet the others' later barrier.
TEST_P(Failures, a_barrier_of_one_rank_is_known_by_its_line) {
  ::setenv("LOCKSTEP_CHECK", "full", 1);
  run([] {
    for (int i = 0; i < 3; ++i) barrier();
    const std::string text = thrown<MismatchError>([] {
      if (get_rank() == 0) barrier();
      barrier();
    });
    const std::string others = get_world_size() == 2 ? "\n  1     barrier" : "\n  1, 2  barrier";
    expect_contains(text, "\n  0     barrier");
    expect_contains(text, others);
    const std::string file = "failures_test.cpp:";
    const auto first = text.find(file, text.find("\n  0 ")),
               second = text.find(file, text.find(others));
    ASSERT_NE(second, std::string::npos) << text;
    EXPECT_EQ(std::stoi(text.substr(first + file.size())) + 1,
              std::stoi(text.substr(second + file.size())))
        << text;
  });
  ::unsetenv("LOCKSTEP_CHECK");
}

TEST_P(Failures, send_and_recv_of_different_counts) {
  run([] {
    const Group group = default_group();
    std::vector<float> data(8);
    if (group.rank() == 0) group.send({data.data(), 8, DType::f32}, 1);
    if (group.rank() == 1) {
      expect_contains(thrown<MismatchError>([&] {
                        group.recv({data.data(), 4, DType::f32}, 0);
                      }),
                      "rank 0 sent 8 elements of f32, rank 1 receives 4 of f32");
    } else {
      EXPECT_THROW(group.barrier(), MismatchError);
    }
  });
}

TEST_P(Failures, missing_rank) {
  const SharedCount here;
  run([&] {
    const auto ranks = thread_of_each_rank();
    const Group group = default_group().duplicate();
    if (group.rank() == 0) {
      barrier();  // joins after the others have timed out
      // It did not wait for itself.
      const std::string text = thrown<TimeoutError>([&] { group.barrier(); });
      expect_contains(text, group.size() == 2
                                ? ": rank 1 waited 0.1 s for rank 0 of 2; arrived: 1\n"
                                : " waited 0.1 s for rank 0 of 3; arrived: 1, 2\n");
      expect_contains(text, ": rank ");
      return;
    }
    // The limit of rank 1 ends after rank 2 has arrived.
    const bool is_first = group.rank() == 1;
    if (!is_first) here.raise();
    if (is_first && group.size() == 3) {
      EXPECT_TRUE(here.wait_for(1));
      EXPECT_TRUE(wait_until_asleep(ranks[2][0]));
    }
    const std::string text = thrown<TimeoutError>(
        [&] { group.barrier(is_first ? milliseconds(100) : milliseconds(60'000)); });
    expect_contains(text, "waited 0.1 s for rank 0 of ");
    expect_contains(text, "rank 0 is ");
    expect_contains(text, "its last call here: none");
    barrier();
  });
}

/// Over ranks that each wait in recv, rank 2 with the shortest limit: what rank 2 throws.
TimeoutError chain_of_recvs(const Group& group, bool is_cycle) {
  std::vector<int> data(1);
  const Elements one{data.data(), 1, DType::i32};
  // When rank 2 begins to wait, the others are in recv.
  group.barrier();
  try {
    if (group.rank() == 0 && !is_cycle) {
      barrier();  // joins after the others have timed out
      group.barrier();
    } else {
      const int from = is_cycle ? (group.rank() + 1) % 3 : group.rank() - 1;
      group.recv(one, from, group.rank() == 2 ? milliseconds(3000) : milliseconds(60'000));
    }
  } catch (const TimeoutError& error) {
    if (group.rank() != 0 && !is_cycle) barrier();
    return error;
  }
  throw std::runtime_error("no TimeoutError");
}

TEST_P(FailuresOfThree, a_late_rank_is_found_behind_those_that_wait_for_it_in_recv) {
  run([] {
    const TimeoutError error = chain_of_recvs(default_group().duplicate(), /*is_cycle=*/false);
    EXPECT_EQ(error.context().peers, std::vector<int>{0});
    const std::string text = error.what();
    expect_contains(text,
                    "rank 2 waited 3 s for rank 1 of 3, which waits for rank 0\n  rank 0 is ");
    expect_contains(text, "\n  rank 1 is ");
    EXPECT_EQ(text.find("arrived: 0"), std::string::npos) << text;
  });
}

TEST_P(FailuresOfThree, ranks_that_wait_for_each_other_in_recv_are_named) {
  run([] {
    const TimeoutError error = chain_of_recvs(default_group().duplicate(), /*is_cycle=*/true);
    EXPECT_EQ(error.context().peers, (std::vector<int>{0, 1}));
    expect_contains(error.what(),
                    "for rank 0 of 3, which waits for rank 1, which waits for rank 2\n");
  });
}

// What each gives for itself may differ, and is not what they disagree on.
/// ErrorContext::peers of the exception thrown by `call`, which must be an E.
template <class E, class F>
std::vector<int> peers_of(F call) {
  try {
    call();
  } catch (const E& error) {
    return error.context().peers;
  }
  return {-1};
}

TEST_P(Failures, carry_the_ranks_that_they_are_about) {
  const SharedCount here;
  run([&] {
    const auto ranks = thread_of_each_rank();
    const Group world = default_group();
    const bool is_odd = world.rank() == 1;
    const std::vector<int> rank_1{1};
    const Group asked = world.duplicate();
    EXPECT_EQ(peers_of<UsageError>([&] { asked.broadcast({}, /*src=*/-1); }), std::vector<int>());
    // Of two ranks neither is the majority.
    const auto call = [&](const Group& group) {
      float value = 1;
      is_odd ? group.barrier() : group.all_reduce({&value, 1, DType::f32});
    };
    EXPECT_EQ(peers_of<MismatchError>([&] { call(asked); }),
              world.size() == 2 ? std::vector<int>() : rank_1);
    EXPECT_EQ(peers_of<MismatchError>([&] { call(asked); }),
              world.size() == 2 ? std::vector<int>() : rank_1);
    const Group late = world.duplicate();
    if (!is_odd) {
      // The limit of rank 0 ends after rank 2 has arrived.
      if (world.rank() == 2) here.raise();
      if (world.rank() == 0 && world.size() == 3) {
        EXPECT_TRUE(here.wait_for(1));
        EXPECT_TRUE(wait_until_asleep(ranks[2][0]));
      }
      const milliseconds limit(world.rank() == 0 ? 100 : 60'000);
      EXPECT_EQ(peers_of<TimeoutError>([&] { late.barrier(limit); }), rank_1);
    }
    const Group failed = world.duplicate();
    if (is_odd) failed.abandon("no data");
    EXPECT_EQ(peers_of<PeerFailed>([&] { failed.barrier(); }), rank_1);
    world.barrier();
    if (is_odd) return destroy_dist();
    EXPECT_EQ(peers_of<PeerLost>([&] { world.barrier(); }), rank_1);
  });
}

TEST_P(Failures, counts_that_differ_for_other_ranks) {
  run([] {
    const Group group = default_group();
    std::vector<std::size_t> counts(static_cast<std::size_t>(group.size()), 1);
    counts[0] = 2;
    if (group.rank() == 1) counts[0] = 3;
    std::vector<double> mine(2), all(8);
    const std::string text = thrown<MismatchError>([&] {
      group.all_gather(
          {mine.data(), group.rank() == 0 ? 2U : 1U, DType::f64},
          {all.data(), static_cast<std::size_t>(group.size()) + (counts[0] - 1), DType::f64},
          counts);
    });
    expect_contains(text, "\n  1     all_gather      f64   by rank ");
    if (group.size() == 3) expect_contains(text, "\n  0, 2  all_gather      f64   by rank ");
    expect_contains(text, "by rank: a hash of the counts");
  });
}

TEST(FailuresOfThreads, one_of_many_ranks_that_differs_is_named_first) {
  run_ranks(40, [](int rank) {
    const std::string text = thrown<MismatchError>([rank] {
      if (rank == 39) {
        barrier();
      } else {
        all_reduce_value(1);
      }
    });
    // A rank that has not arrived when the table is made is listed last.
    if (text.find("not arrived") == std::string::npos)
      expect_contains(text, "\n  0-38  all_reduce ");
    expect_contains(text, "where\n  39 ");
  });
}

TEST_P(Failures, a_rank_that_leaves_early) {
  run([] {
    const Group group = default_group();
    barrier();
    if (group.rank() == 1) {
      destroy_dist();
      return;
    }
    const std::string text = thrown<PeerLost>([&] { group.barrier(); });
    expect_contains(text, "rank 1 left the world");
    expect_contains(text, "Its last call here: barrier #1 at failures_test.cpp:");
  });
}

TEST_P(Failures, a_buffer_larger_than_the_memory_there_is) {
  run([] {
    const Group group = default_group().duplicate();
    const std::string text =
        thrown<SystemError>([&] { static_cast<void>(group.allocate(std::size_t{1} << 45U)); });
    expect_contains(text, "rank 0 could not reserve shared memory");
    expect_contains(text, "errno 12");
    barrier();
  });
}

TEST_P(Failures, a_message_from_a_rank_that_has_left_still_arrives) {
  const SharedCount left;
  run([&] {
    const Group group = default_group();
    std::vector<float> data = {1, 2, 3};
    if (group.rank() == 0) {
      send(data, 1);
      destroy_dist();
      left.raise();
    } else if (group.rank() == 1) {
      EXPECT_TRUE(left.wait_for(1));
      recv(data, 0);
      EXPECT_EQ(data[2], 3);
      EXPECT_THROW(recv(data, 0), PeerLost);
    }
  });
}

TEST_P(FailuresOfThree, messages_for_several_ranks_from_one_that_has_left_still_arrive) {
  const SharedCount left;
  run([&] {
    const Group group = default_group();
    const auto ranks = thread_of_each_rank();
    if (group.rank() == 0) {
      send(std::vector<int>{1}, 1);
      send(std::vector<int>{2}, 2);
      destroy_dist();
      left.raise();
      return;
    }
    std::vector<int> got(1);
    // Rank 2 checks peer liveness several times while its message is queued behind that of rank 1.
    if (group.rank() == 1) {
      EXPECT_TRUE(left.wait_for(1));
      const long before = n_sleeps(ranks[2][0]);
      EXPECT_TRUE(wait_until([&] { return n_sleeps(ranks[2][0]) >= before + 4; }));
    }
    recv(got, 0);
    EXPECT_EQ(got[0], group.rank());
  });
}

TEST_P(FailuresOfThree, rank_that_does_not_receive_is_named) {
  run([] {
    const Group group = default_group();
    std::vector<int> data(1);
    if (group.rank() == 0) {
      send(data, 1);
      send(data, 1);
      expect_contains(thrown<PeerLost>([&] { send(data, 2); }), "rank 1 left the world");
    } else if (group.rank() == 1) {
      destroy_dist();
    } else {
      expect_contains(thrown<PeerLost>([&] { recv(data, 0); }), "rank 1 left the world");
    }
  });
}

TEST(FailuresOfThreads, an_exception_reaches_the_peers_and_the_caller) {
  std::string text_at_peer;
  const auto body = [&](int rank) {
    if (rank == 1) throw std::runtime_error("no more disk");
    if (rank == 0) {
      text_at_peer = thrown<PeerFailed>([] { barrier(); });
    } else {
      barrier();
    }
  };
  try {
    run_ranks(3, body);
    FAIL() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "no more disk");  // not the echo of rank 2
  }
  expect_contains(text_at_peer, "rank 1 failed: no more disk");
}

void expect_all_notice_the_death_of(int victim, int n, const std::function<void()>& die,
                                    int expected_status, const std::string& expected_text) {
  const auto statuses = run_processes(n, [&] {
    barrier();
    if (get_rank() == victim) die();
    const std::string text = thrown<PeerLost>([] { barrier(); });
    expect_contains(text, "rank " + std::to_string(victim) + " " + expected_text);
  });
  for (int rank = 0; rank < n; ++rank) {
    EXPECT_EQ(statuses[static_cast<std::size_t>(rank)], rank == victim ? expected_status : 0);
  }
}

TEST_P(FailuresOfThree, the_first_of_two_ranks_that_left_is_named) {
  const SharedCount n_left;
  run([&] {
    const int rank = get_rank();
    barrier();
    EXPECT_TRUE(n_left.wait_for(2 - rank));
    if (rank > 0) {
      destroy_dist();
      return n_left.raise();
    }
    const std::string text = thrown<PeerLost>([] { barrier(); });
    expect_contains(text, "rank 2 left the world");
    EXPECT_EQ(text.find("rank 1"), std::string::npos) << text;
  });
}

TEST(FailuresOfProcesses, killed) {
  expect_all_notice_the_death_of(
      1, 4, [] { ::raise(SIGKILL); }, SIGKILL, "was killed by signal 9 (SIGKILL)");
}

TEST(FailuresOfProcesses, exits) {
  expect_all_notice_the_death_of(
      0, 3, [] { ::_exit(7); }, 7 << 8, "exited with code 7");
}

TEST(FailuresOfProcesses, killed_while_it_computes_and_the_others_sleep) {
  const SharedCount n_started;
  const auto statuses = run_processes(
      3,
      [&] {
        barrier();
        n_started.raise();
        while (get_rank() == 1) {
        }
        expect_contains(thrown<PeerLost>([] { barrier(); }), "rank 1 was killed by signal 9");
      },
      seconds(60),
      [&](std::span<const pid_t> pids) {
        EXPECT_TRUE(n_started.wait_for(3));
        for (const int rank : {0, 2}) {
          EXPECT_TRUE(wait_until_asleep(pids[static_cast<std::size_t>(rank)]));
        }
        ::kill(pids[1], SIGKILL);
      });
  EXPECT_EQ(statuses[0], 0);
  EXPECT_EQ(statuses[1], SIGKILL);
  EXPECT_EQ(statuses[2], 0);
}

TEST(FailuresOfProcesses, stopped_is_reported) {
  const SharedCount told;
  const auto statuses = run_processes(
      2,
      [&] {
        const auto ranks = thread_of_each_rank();
        if (get_rank() == 1) ::raise(SIGSTOP);
        if (get_rank() == 0) {
          EXPECT_TRUE(wait_until([&] { return thread_state(ranks[1][0]) == 'T'; }));
          const std::string text =
              thrown<TimeoutError>([] { barrier(default_group(), milliseconds(50)); });
          told.raise();
          expect_contains(text, "rank 1 is stopped by a signal or a debugger");
        } else {
          EXPECT_THROW(barrier(), TimeoutError);
        }
      },
      seconds(60),
      [&](std::span<const pid_t> pids) {
        EXPECT_TRUE(told.wait_for(1));
        ::kill(pids[1], SIGCONT);
      });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

/// The calling process can map no more than so much from here on.
void limit_address_space(std::size_t n_bytes_more) {
  std::size_t n_pages = 0;
  std::ifstream("/proc/self/statm") >> n_pages;
  const rlim_t n_bytes = n_pages * static_cast<std::size_t>(::getpagesize()) + n_bytes_more;
  const rlimit limit{.rlim_cur = n_bytes, .rlim_max = n_bytes};
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
}

TEST(FailuresOfProcesses, a_buffer_that_one_rank_cannot_map_is_an_error_on_all) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer takes address space of its own, which the test limits";
#endif
  const auto statuses = run_processes(3, [] {
    const Group group = default_group().duplicate();
    if (get_rank() == 1) limit_address_space(/*n_bytes_more=*/8U << 20U);
    const std::string text =
        thrown<SystemError>([&] { static_cast<void>(group.allocate(std::size_t{16} << 20U)); });
    expect_contains(text, "rank 1 could not map shared memory: cannot map ");
    expect_contains(text, "(errno 12)");
    EXPECT_EQ(text.find("(errno 12)"), text.rfind("(errno 12)")) << text;
    barrier();  // the world is another group
  });
  EXPECT_EQ(statuses, std::vector<int>(3, 0));
}

TEST(FailuresOfProcesses, a_group_that_one_rank_cannot_map_is_an_error_on_all) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer takes address space of its own, which the test limits";
#endif
  const auto statuses = run_processes(3, [] {
    const Group group = default_group().duplicate();
    if (get_rank() == 1) limit_address_space(/*n_bytes_more=*/1U << 20U);
    expect_contains(thrown<SystemError>([&] { static_cast<void>(group.split(0)); }),
                    "rank 1 could not map shared memory: cannot map ");
    barrier();
  });
  EXPECT_EQ(statuses, std::vector<int>(3, 0));
}

TEST(FailuresOfProcesses, in_an_endless_loop_is_reported) {
  const SharedCount looping;
  const SharedCount told;
  const auto statuses = run_processes(2, [&] {
    barrier();
    if (get_rank() == 1) {
      looping.raise();
      while (told.value() == 0) {
      }
      EXPECT_THROW(barrier(), TimeoutError);
      return;
    }
    EXPECT_TRUE(looping.wait_for(1));
    const std::string text =
        thrown<TimeoutError>([] { barrier(default_group(), milliseconds(50)); });
    told.raise();
    expect_contains(text, "rank 1 is running (pid ");
    expect_contains(text, "outside lockstep for ");
    expect_contains(text, "(last call: barrier #1 on group 'world' at failures_test.cpp:");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(FailuresOfProcesses, in_another_call_is_reported) {
  const SharedCount calling;
  const auto statuses = run_processes(2, [&] {
    const Group other = default_group().duplicate();
    const auto ranks = thread_of_each_rank();
    if (get_rank() == 1) {
      calling.raise();
      other.barrier();  // joins after the other has timed out
      return;
    }
    EXPECT_TRUE(calling.wait_for(1));
    EXPECT_TRUE(wait_until_asleep(ranks[1][0]));
    const std::string text =
        thrown<TimeoutError>([] { barrier(default_group(), milliseconds(50)); });
    expect_contains(text, "now in barrier #1 on group 'world/1.0' at failures_test.cpp:");
    other.barrier();
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(FailuresOfProcesses, an_uncaught_exception_reaches_the_peers) {
  const auto statuses = run_processes(3, [] {
    barrier();
    const auto fail = [] { throw std::runtime_error("no more disk"); };
    if (get_rank() == 1) [&]() noexcept { fail(); }();
    expect_contains(thrown<PeerFailed>([] { barrier(); }), "rank 1 failed: no more disk");
  });
  EXPECT_EQ(statuses[0], 0);
  EXPECT_EQ(statuses[1] & 0x7f, SIGABRT);
  EXPECT_EQ(statuses[2], 0);
}

TEST(FailuresOfProcesses, leaving_with_a_reason_fails_the_peers) {
  const auto statuses = run_processes(3, [] {
    const auto ranks = thread_of_each_rank();
    if (get_rank() == 0) {
      expect_contains(thrown<PeerFailed>([] { barrier(); }), "rank 1 failed: the disk is full");
    } else if (get_rank() == 1) {
      for (const std::size_t rank : {0U, 2U}) EXPECT_TRUE(wait_until_asleep(ranks[rank][0]));
      destroy_dist("the disk is full");
    } else {
      EXPECT_THROW(barrier(), PeerFailed);
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

TEST(FailuresOfProcesses, unwinding_past_destroy_dist_fails_the_peers) {
  const auto statuses = run_processes(2, [] {
    if (get_rank() == 1) {
      struct Leave {
        ~Leave() { destroy_dist(); }
      };
      try {
        const Leave leave;
        throw std::runtime_error("unseen");
      } catch (const std::runtime_error&) {
      }
      return;
    }
    expect_contains(thrown<PeerFailed>([] { barrier(); }), "rank 1 failed: an exception");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(FailuresOfProcesses, a_rank_that_never_joins_is_named) {
  const shared::Job job(2);  // and no process is rank 1
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setenv("RANK", "0", 1);
    ::setenv("WORLD_SIZE", "2", 1);
    ::setenv("LOCAL_RANK", "0", 1);
    ::setenv("LOCAL_WORLD_SIZE", "2", 1);
    ::setenv("LOCKSTEP_SEGMENT", job.environment().c_str(), 1);
    const std::string text =
        thrown<TimeoutError>([] { init_dist({.timeout = milliseconds(100)}); });
    EXPECT_TRUE(
        text.starts_with("init_dist on group 'world' (rank 0, call #1) at failures_test.cpp"))
        << text;
    expect_contains(text, "rank 1 has not joined the world yet (init_dist)");
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
}

TEST(FailuresOfProcesses, levels_of_checking_that_differ_are_reported) {
  const shared::Job job(2);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 2; ++rank) {
    std::fflush(nullptr);
    pids.push_back(::fork());
    if (pids.back() != 0) continue;
    for (const char* name : {"RANK", "LOCAL_RANK"}) {
      ::setenv(name, std::to_string(rank).c_str(), 1);
    }
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) ::setenv(name, "2", 1);
    ::setenv("LOCKSTEP_SEGMENT", job.environment().c_str(), 1);
    if (rank == 1) ::setenv("LOCKSTEP_CHECK", "full", 1);
    const std::string text = thrown<MismatchError>([] { init_dist(); });
    expect_contains(text, "LOCKSTEP_CHECK must be the same on all ranks, but it is ");
    expect_contains(text, "full on rank 1");
    std::fflush(nullptr);
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  for (const pid_t pid : pids) {
    int status = -1;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
  }
}

TEST(FailuresOfProcesses, a_rank_joins_once) {
  const auto statuses = run_processes(1, [] {
    destroy_dist();
    expect_contains(thrown<UsageError>([] { init_dist(); }), "each rank joins once");
  });
  EXPECT_EQ(statuses, std::vector<int>{0});
}

}  // namespace
}  // namespace lockstep::test
