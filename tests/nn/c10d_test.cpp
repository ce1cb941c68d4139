#include <lockstep/nn/c10d.hpp>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "base/process.hpp"
#include "layer_ranks.hpp"
#include "nn/gloo_engine/c10d_rendezvous.hpp"
#include "support/expect.hpp"
#include "support/free_port.hpp"
#include "support/ranks.hpp"
#include "support/waiting.hpp"

namespace lockstep::nn {
namespace {

using namespace std::chrono_literals;
using test::run_processes;

/// The processes' statuses, of ranks over Gloo. The body begins when init_dist has returned on all:
/// a failure may overtake the messages of the call before it, which then has it.
std::vector<int> over_gloo(int n, const std::function<void()>& body,
                           std::chrono::seconds watchdog = test::kWatchdog) {
  const test::SharedCount n_joined;
  const auto joined = [&] {
    n_joined.raise();
    EXPECT_TRUE(n_joined.wait_for(n));
    body();
  };
  return run_processes(n, joined, watchdog, /*started=*/{}, "gloo");
}

/// What `call` throws; fails the test where it does not throw an E that says `part`.
template <class E>
void expect_error(const std::function<void()>& call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "no error; expected one with: " << part;
  } catch (const E& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
        << "no \"" << part << "\" in: " << error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
  }
}

TEST(C10dTest, a_killed_rank_is_named_on_every_rank) {
  const auto statuses = over_gloo(3, [] {
    if (get_rank() == 1) ::raise(SIGKILL);
    expect_error<PeerLost>([] { barrier(); }, "rank 1 is gone");
    expect_error<PeerLost>([] { barrier(); }, "rank 1 is gone");  // the group is dead
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, SIGKILL, 0}));
}

TEST(C10dTest, the_text_of_a_ranks_exception_reaches_the_others) {
  const auto statuses = over_gloo(3, [] {
    try {
      main_process_first([] {
        if (get_rank() == 0) throw std::runtime_error("no such file: x.bin");
      });
      ADD_FAILURE() << "no error";
    } catch (const PeerFailed& error) {
      test::expect_contains(error.text(), "no such file: x.bin");
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(get_rank(), 0) << error.what();
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

TEST(C10dTest, failure_with_another_rank) {
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
  const auto statuses = over_gloo(3, [&pipe] {
    const Group world = default_group();
    std::int64_t value = 0;
    const Elements whole{&value, 1, DType::i64};
    char done = 1;
    if (get_rank() == 2) {
      destroy_dist("no more sheets");
    } else if (get_rank() == 1) {
      expect_error<PeerFailed>([&] { world.recv(whole, 2); }, "rank 2 failed: no more sheets");
      // Alive, so that the connection to it says nothing.
      EXPECT_EQ(::read(pipe[0], &done, 1), 1);
    } else {
      expect_error<PeerFailed>([&] { world.recv(whole, 1, Timeout(5s)); },
                               "rank 2 failed: no more sheets");
      EXPECT_EQ(::write(pipe[1], &done, 1), 1);
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
  for (const int fd : pipe) ::close(fd);
}

/// Rank 1 is killed after it has announced so many control messages to rank 0, which is stopped.
void kill_while_it_notifies(int n_messages) {
  const test::SharedCount stopped;
  const test::SharedCount killed;
  const test::SharedCount n_done;
  const auto state_of = [](const test::SharedCount& pid) {
    return pid.value() == 0 ? 'R' : test::thread_state(pid.value());
  };
  const auto statuses = over_gloo(3, [&] {
    std::vector<Group> firsts;
    for (int i = 0; i < n_messages; ++i) firsts.push_back(default_group().duplicate());
    const Group second = default_group().duplicate();
    std::int64_t value = 0;
    const Elements whole{&value, 1, DType::i64};
    barrier();
    if (get_rank() == 0) {
      stopped.store(::getpid());
      ::raise(SIGSTOP);
      // It has the beginning of control messages and a closed connection.
      expect_error<Error>([&] { firsts[0].recv(whole, 1); }, "rank 1 ");
      n_done.raise();
      expect_error<PeerFailed>([&] { second.recv(whole, 2, Timeout(20s)); },
                               "rank 2 failed: no more sheets");
      n_done.raise();
    } else if (get_rank() == 1) {
      EXPECT_TRUE(test::wait_until([&] { return state_of(stopped) == 'T'; }));
      for (Group& first : firsts) first.abandon("the disk is full");
      killed.store(::getpid());
      ::raise(SIGKILL);
    } else {
      EXPECT_TRUE(test::wait_until([&] { return std::strchr("ZX", state_of(killed)) != nullptr; }));
      ::kill(stopped.value(), SIGCONT);
      EXPECT_TRUE(n_done.wait_for(1));
      second.abandon("no more sheets");
      EXPECT_TRUE(n_done.wait_for(2));  // alive, so that the connection to it says nothing
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, SIGKILL, 0}));
}

TEST(C10dTest, a_rank_killed_while_it_notifies_another_does_not_keep_others_from_it) {
  kill_while_it_notifies(1);
}
// Gloo then receives nothing more from any rank.
TEST(C10dTest, a_rank_killed_while_it_notifies_another_of_several_failures) {
  kill_while_it_notifies(2);
  kill_while_it_notifies(5);
}

// To a stopped rank no message gets through: no failure may wait for that.
TEST(C10dTest, failures_are_not_delayed_by_a_stopped_rank) {
  constexpr int kGroups = 60;  // each asks for 0.25 s; a second more for each is too long
  const test::SharedCount stopped;
  const auto statuses = over_gloo(
      2,
      [&] {
        std::vector<Group> groups;
        for (int i = 0; i < kGroups; ++i) groups.push_back(default_group().duplicate());
        barrier();
        if (get_rank() == 1) {
          stopped.store(::getpid());
          ::raise(SIGSTOP);
          return;
        }
        EXPECT_TRUE(test::wait_until(
            [&] { return stopped.value() != 0 && test::thread_state(stopped.value()) == 'T'; }));
        for (const Group& group : groups) {
          expect_error<TimeoutError>([&] { barrier(group, 10ms); }, "for rank 1 of 2");
        }
        ::kill(stopped.value(), SIGCONT);
      },
      70s);
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(C10dTest, the_whole_text_of_a_long_failure_reaches_the_others) {
  const std::string text = std::string(40'000, 'x') + ", the end";
  const auto statuses = over_gloo(2, [&text] {
    if (get_rank() == 0) return destroy_dist(text);
    expect_error<PeerFailed>([] { barrier(); }, text);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(C10dTest, a_copy_of_a_rank_can_neither_call_nor_keep_it_from_ending) {
  const auto statuses = over_gloo(2, [] {
    std::fflush(nullptr);
    const pid_t copy = ::fork();
    ASSERT_GE(copy, 0);
    if (copy == 0) {
      ::alarm(20);  // it hung
      expect_error<UsageError>([] { barrier(); }, "this process is a fork of a rank");
      destroy_dist();
      ::_exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(copy, &status, 0), copy);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(all_reduce_value(1), 2);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(C10dTest, a_late_rank_is_named_and_other_groups_go_on) {
  const auto statuses = over_gloo(3, [] {
    const Group world = default_group(), other = world.duplicate();
    if (get_rank() == 2) other.barrier();  // comes when the others have given up
    expect_error<TimeoutError>(
        [&] {
          world.barrier(3s);
          world.barrier();  // rank 2: where the others' first messages were sooner than their error
        },
        "waited 3 s for rank 2 of 3");
    if (get_rank() != 2) other.barrier();
    EXPECT_EQ(all_reduce_value(1, ReduceOp::sum, other), 3);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

TEST(C10dTest, a_late_rank_is_found_behind_one_that_waits_for_it) {
  const auto statuses = over_gloo(3, [] {
    const Group world = default_group(), other = world.duplicate();
    std::vector<int> data(1);
    const Elements one{data.data(), 1, DType::i32};
    world.barrier();
    if (get_rank() == 0) {
      other.barrier();  // comes when the others have given up
      expect_error<TimeoutError>([&] { world.barrier(); }, "waited 3 s for rank 0 of 3");
    } else {
      expect_error<TimeoutError>(
          [&] { world.recv(one, get_rank() - 1, get_rank() == 2 ? 3s : 50s); },
          "rank 2 waited 3 s for rank 0 of 3");
      other.barrier();
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

TEST(C10dTest, late_rank_keeps_connections) {
  const auto statuses = over_gloo(2, [] {
    const Group world = default_group();
    for (int round = 0; round < 10; ++round) {
      const Group other = world.duplicate();
      if (get_rank() == 1) world.barrier();
      expect_error<TimeoutError>(
          [&] {
            for (;;) other.barrier(20ms);
          },
          "waited 0.02 s for rank");
      if (get_rank() == 0) world.barrier();
      EXPECT_EQ(all_reduce_value(1), 2);
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(C10dTest, a_connection_that_a_long_message_was_left_on_is_reported) {
  ::setenv("LOCKSTEP_CHECK", "off", 1);  // so that data is the first that goes
  const auto statuses = over_gloo(2, [] {
    const Group world = default_group(), other = world.duplicate();
    std::vector<float> data(1 << 18);
    const Elements whole{data.data(), data.size(), DType::f32};
    const std::string left = "a call that gave up left a part of its data on this connection";
    if (get_rank() == 0) {
      expect_error<TimeoutError>([&] { world.recv(whole, 1, 50ms); }, "waited 0.05 s for rank 1");
      expect_error<EngineError>([&] { other.barrier(); }, left);
    } else {
      expect_error<PeerFailed>([&] { other.barrier(); }, left);
    }
  });
  ::unsetenv("LOCKSTEP_CHECK");
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(C10dTest, different_calls_give_a_table_on_every_rank) {
  const auto statuses = over_gloo(3, [] {
    std::vector<float> data(get_rank() == 1 ? 7 : 8);
    expect_error<MismatchError>([&] { lockstep::all_reduce(data); },
                                "1     all_reduce      f32   7           -     sum");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

// More than eight ranks exchange short messages in levels.
constexpr int kManyRanks = 11;

void expect_all_zero(const std::vector<int>& statuses) {
  EXPECT_EQ(statuses, std::vector<int>(statuses.size(), 0));
}

TEST(C10dLevelsTest, data_of_many_ranks) {
  expect_all_zero(over_gloo(kManyRanks, [] {
    const int rank = get_rank();
    EXPECT_EQ(all_reduce_value(rank), 55);
    for (const std::size_t count : {1, 100, 20'000}) {
      std::vector<int> data(count, rank);
      lockstep::all_reduce(data);
      EXPECT_EQ(data, std::vector<int>(count, 55));
      const auto parts = lockstep::all_gather(std::vector<int>(count, rank));
      for (int r = 0; r < kManyRanks; ++r) {
        EXPECT_EQ(parts[static_cast<std::size_t>(r)], std::vector<int>(count, r));
      }
      std::vector<int> of_root(count, rank);
      lockstep::broadcast(of_root, 4);
      EXPECT_EQ(of_root, std::vector<int>(count, 4));
    }
    std::vector<int> message(3, rank);
    if (rank == 9) lockstep::send(message, 2);
    if (rank == 2) {
      lockstep::recv(message, 9);
      EXPECT_EQ(message, std::vector<int>(3, 9));
    }
    const Group half = default_group().split(rank % 2);
    EXPECT_EQ(all_reduce_value(1, ReduceOp::sum, half), rank % 2 == 0 ? 6 : 5);
  }));
}

TEST(C10dLevelsTest, every_rank_gets_the_table_of_different_calls) {
  expect_all_zero(over_gloo(kManyRanks, [] {
    std::vector<float> data(get_rank() == 7 ? 7 : 8);
    expect_error<MismatchError>([&] { lockstep::all_reduce(data); },
                                "7     all_reduce      f32   7           -     sum");
  }));
}

TEST(C10dLevelsTest, a_recv_beside_a_collective_is_a_mismatch) {
  expect_all_zero(over_gloo(kManyRanks, [] {
    std::vector<float> data(8);
    expect_error<MismatchError>(
        [&] { get_rank() == 3 ? lockstep::recv(data, 9) : lockstep::all_reduce(data); }, "recv");
  }));
}

TEST(C10dLevelsTest, late_ranks_are_named_not_those_that_wait_for_them) {
  expect_all_zero(over_gloo(kManyRanks, [] {
    const Group world = default_group(), other = world.duplicate();
    const bool is_late = get_rank() == 4 || get_rank() == 9;
    if (is_late) other.barrier();  // comes when the others have given up
    expect_error<TimeoutError>(
        [&] {
          world.barrier(get_rank() == 0 ? 5s : 50s);
          world.barrier();
        },
        "waited 5 s for ranks 4, 9 of 11");
    if (!is_late) other.barrier();
    EXPECT_EQ(all_reduce_value(1, ReduceOp::sum, other), kManyRanks);
  }));
}

TEST(C10dLevelsTest, a_killed_rank_is_named_on_every_rank) {
  const auto statuses = over_gloo(kManyRanks, [] {
    if (get_rank() == 5) ::raise(SIGKILL);
    try {
      for (;;) barrier();
    } catch (const PeerLost& error) {
      test::expect_contains(error.what(), "rank 5");
    }
  });
  for (int r = 0; r < kManyRanks; ++r) {
    EXPECT_EQ(statuses[static_cast<std::size_t>(r)], r == 5 ? SIGKILL : 0) << r;
  }
}

TEST(C10dTest, a_rank_that_leaves_is_named) {
  const auto statuses = over_gloo(2, [] {
    if (get_rank() == 0) return;
    expect_error<PeerLost>([] { barrier(); }, "rank 0 left the world");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(C10dTest, a_rank_that_leaves_and_keeps_its_connections_ends_the_calls_that_wait_for_it) {
  for (const std::string reason : {"", "no more sheets"}) {
    const test::SharedCount n_told;
    const auto statuses = over_gloo(3, [&] {
      const Group kept = default_group().duplicate();
      if (get_rank() == 1) {
        destroy_dist(reason);
        EXPECT_TRUE(n_told.wait_for(2));
        return;
      }
      expect_error<Error>([&] { kept.barrier(Timeout::never()); },
                          reason.empty() ? "rank 1 left" : "rank 1 failed: no more sheets");
      n_told.raise();
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
  }
}

TEST(C10dTest, hierarchical_has_gloo_between_hosts) {
  const auto statuses = run_processes(
      3,
      [] {
        EXPECT_EQ(get_backend(), "hierarchical");
        EXPECT_EQ(all_reduce_value(get_rank()), 3);
        EXPECT_EQ(get_local_size(), 3);
      },
      60s, /*started=*/{}, "hierarchical");
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

TEST(C10dTest, every_operation_is_right_where_init_dist_checks_them) {
  ::setenv("LOCKSTEP_CHECK", "full", 1);
  const auto statuses = over_gloo(3, [] { EXPECT_EQ(all_reduce_value(1), 3); });
  ::unsetenv("LOCKSTEP_CHECK");
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

TEST(C10dTest, one_world_after_another_at_the_same_port) {
  const auto statuses = over_gloo(3, [] {
    for (int turn = 0; turn < 10; ++turn) {
      EXPECT_EQ(all_reduce_value(1), 3);
      destroy_dist();
      init_dist({.backend = "gloo"});
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

TEST(C10dTest, init_after_destroy_at_another_port) {
  const test::FreePort other;
  const auto statuses = over_gloo(2, [other = std::to_string(other.number())] {
    EXPECT_EQ(get_backend(), "gloo");
    barrier();
    destroy_dist();
    ::setenv("MASTER_PORT", other.c_str(), 1);
    init_dist({.backend = "gloo"});
    EXPECT_EQ(all_reduce_value(1), 2);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

/// init_dist as one rank of `size`, in this process.
void init_alone(int rank, const std::string& port, std::chrono::milliseconds timeout,
                int size = 2) {
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) {
    ::setenv(name, std::to_string(size).c_str(), 1);
  }
  ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", port.c_str(), 1);
  init_dist({.backend = "gloo", .timeout = timeout});
}

class C10dInitTest : public ::testing::Test {
 protected:
  ~C10dInitTest() override {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
      ::unsetenv(name);
    }
  }
};

TEST_F(C10dInitTest, a_port_in_use_is_named) {
  const int fd = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_any;
  socklen_t n_bytes = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(::bind(fd, any, n_bytes), 0);
  ASSERT_EQ(::listen(fd, 1), 0);
  ASSERT_EQ(::getsockname(fd, any, &n_bytes), 0);
  const std::string port = std::to_string(ntohs(address.sin6_port));
  expect_error<EngineError>([&] { init_alone(0, port, 5s); }, "MASTER_PORT is " + port);
  ::close(fd);
}

TEST_F(C10dInitTest, invalid_port) {
  for (const std::string port : {"x", "0", "65536", "29500 "}) {
    expect_error<UsageError>([&] { init_alone(0, port, 5s); }, "MASTER_PORT is ");
    expect_error<UsageError>([&] { init_alone(0, port, 5s); }, port);
  }
}

TEST_F(C10dInitTest, missing_ranks) {
  const test::FreePort port;
  expect_error<TimeoutError>([&] { init_alone(0, std::to_string(port.number()), 300ms); },
                             "of 2 ranks, rank 1 did not join at 127.0.0.1:");
}

TEST_F(C10dInitTest, missing_ranks_on_every_rank) {
  const test::FreePort port;
  const auto join = [&](int rank, std::chrono::milliseconds timeout) {
    expect_error<TimeoutError>([&] { init_alone(rank, std::to_string(port.number()), timeout, 3); },
                               "of 3 ranks, rank 2 did not join at 127.0.0.1:");
  };
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(60);
    join(1, 50s);  // has time left when the other gives up
    ::_exit(::testing::Test::HasFailure() ? 4 : 0);
  }
  join(0, 5s);
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
}

TEST_F(C10dInitTest, the_store_has_no_server) {
  const test::FreePort port;
  expect_error<EngineError>([&] { init_alone(1, std::to_string(port.number()), 1s); },
                            "MASTER_ADDR is 127.0.0.1, MASTER_PORT is ");
}

TEST_F(C10dInitTest, a_port_where_something_else_speaks_is_named) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t n_bytes = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(::bind(fd, any, n_bytes), 0);
  ASSERT_EQ(::listen(fd, 16), 0);
  ASSERT_EQ(::getsockname(fd, any, &n_bytes), 0);
  std::jthread greeter([fd] {
    ::setpriority(PRIO_PROCESS, 0, -20);  // of this thread, if allowed: greets within milliseconds
    const std::string greeting(4096, '\xa5');
    std::vector<int> connections;
    for (int c = -1; (c = ::accept4(fd, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) {
      static_cast<void>(::send(c, greeting.data(), greeting.size(), MSG_NOSIGNAL));
      connections.push_back(c);
    }
    for (const int c : connections) ::close(c);
  });
  const int first = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  char byte = 0;
  ASSERT_EQ(::connect(first, any, n_bytes), 0);
  ASSERT_EQ(::recv(first, &byte, 1, 0), 1);  // it is at work
  ::close(first);
  expect_error<EngineError>([&] { init_alone(1, std::to_string(ntohs(address.sin_port)), 500ms); },
                            "is not a TCPStore");
  ::shutdown(fd, SHUT_RDWR);  // accept ends
  greeter.join();
  ::close(fd);
}

/// Of rank `rank` of 3 over a store, in a thread.
detail::Membership join_over(const detail::StorePtr& store, int rank,
                             std::chrono::milliseconds limit,
                             const detail::Membership* earlier = nullptr) {
  detail::Rendezvous rendezvous(store, {.context = {.operation = "join", .rank = rank},
                                        .size = 3,
                                        .timeout = limit,
                                        .keys = "ranks",
                                        .action = "join",
                                        .earlier = earlier,
                                        .earlier_ranks = {0, 1, 2}});
  rendezvous.join(lockstep::detail::JobClock::now() + limit);
  return rendezvous.membership();
}

TEST(RendezvousTest, ranks_learn_of_each_other_again_and_again) {
  const detail::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&store, rank] {
      const detail::Membership first = join_over(store, rank, 50s);
      EXPECT_EQ(first.size(), 3);
      EXPECT_EQ(first.rank, rank);
      EXPECT_TRUE(first.is_on_one_host());
      EXPECT_FALSE(first.has_ended(1));
      EXPECT_NE(join_over(store, rank, 50s, &first).job, first.job);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(RendezvousTest, a_rank_that_is_late_is_named_by_all_when_one_has_no_time_left) {
  const detail::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::thread other([&] {
    expect_error<TimeoutError>([&] { join_over(store, 1, 24h); },
                               "of 3 ranks, rank 2 did not join");
  });
  expect_error<TimeoutError>([&] { join_over(store, 0, 300ms); },
                             "of 3 ranks, rank 2 did not join within 300 ms");
  other.join();
  // One that comes later is told too, at once.
  expect_error<TimeoutError>([&] { join_over(store, 2, 24h); }, "rank 2 did not join");
}

TEST(RendezvousTest, a_rank_that_has_ended_is_named_by_all) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  const detail::Membership::Process own{::getpid(), base::process_start_time(::getpid())};
  const detail::Membership earlier{
      .rank = 0,
      .job = {},
      .hosts = {0, 0, 0},
      .processes = {own, own, {child, base::process_start_time(child)}}};
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(earlier.has_ended(2));
  const detail::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::thread other([&] {  // knows no earlier group
    expect_error<PeerLost>([&] { join_over(store, 1, 24h); }, "rank 2 ended and did not join");
  });
  expect_error<PeerLost>([&] { join_over(store, 0, 24h, &earlier); },
                         "rank 2 ended and did not join");
  other.join();
}

/// The caller's own process group, of threads.
TEST(C10dTest, a_group_over_ones_own_process_group) {
  testing::on_gloo(3, [](int rank) {
    const Group group = default_group();
    EXPECT_EQ(group.name(), "mine");
    EXPECT_EQ(group.backend(), "gloo");
    EXPECT_EQ(all_reduce_value(rank + 1, ReduceOp::sum, group), 6);
    const Group pair = group.split(rank == 1 ? 1 : 0);
    EXPECT_EQ(all_reduce_value(1, ReduceOp::sum, pair), rank == 1 ? 1 : 2);
    group.barrier();
  });
}

}  // namespace
}  // namespace lockstep::nn
