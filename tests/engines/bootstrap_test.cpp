#include "engines/shared/bootstrap/bootstrap.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <thread>

#include "base/fd.hpp"
#include "base/text.hpp"
#include "base/version.hpp"
#include "engines/shared/bootstrap/bootstrap_common.hpp"
#include "support/expect.hpp"
#include "support/namespaces.hpp"
#include "support/sanitizers.hpp"
#include "support/waiting.hpp"
#include "world/environment.hpp"

namespace lockstep::shared {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Ranks as torchrun starts them: identified by variables, without an inherited segment.
class BootstrapTest : public testing::Test {
 protected:
  ~BootstrapTest() override {
    for (const pid_t pid : pids_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }

  /// A child whose failed expectations and exceptions fail the test.
  pid_t start(const std::function<void()>& body) {
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid != 0) {
      pids_.push_back(pid);
      return pid;
    }
    ::alarm(60);  // the watchdog
    int code = 0;
    try {
      body();
    } catch (const std::exception& error) {
      fmt::print(stderr, "{}\n", error.what());
      code = 3;
    }
    if (HasFailure()) code = 4;
    std::fflush(nullptr);
    ::_exit(code);
  }

  pid_t start_rank(int rank, int n_ranks, const std::function<void()>& body) {
    return start([=, this] {
      ::setenv("RANK", std::to_string(rank).c_str(), 1);
      ::setenv("WORLD_SIZE", std::to_string(n_ranks).c_str(), 1);
      ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
      ::setenv("LOCAL_WORLD_SIZE", std::to_string(n_ranks).c_str(), 1);
      ::setenv("MASTER_ADDR", "127.0.0.1", 1);
      ::setenv("MASTER_PORT", port_.c_str(), 1);
      body();
    });
  }

  /// The socket's name, as the ranks of this test have it.
  std::string name() const {
    return bootstrap_socket_name(fmt::format("MASTER_ADDR=127.0.0.1 MASTER_PORT={}", port_));
  }

  int wait_for(pid_t pid) {
    int status = -1;
    EXPECT_EQ(::waitpid(pid, &status, 0), pid);
    std::erase(pids_, pid);
    return status;
  }

  void expect_all_pass() {
    while (!pids_.empty()) EXPECT_EQ(wait_for(pids_.front()), 0);
    EXPECT_EQ(n_sockets(), 0) << "left behind";
  }

  /// Sockets of the bootstrap in the system: the listening one, and one for each rank that has
  /// connected.
  int n_sockets() const {
    std::ifstream table("/proc/net/unix");
    int n = 0;
    for (std::string line; std::getline(table, line);)
      n += line.ends_with(fmt::format("@{}", name())) ? 1 : 0;
    return n;
  }

  void wait_for_sockets(int n) const {
    ASSERT_TRUE(test::wait_until([&] { return n_sockets() >= n; })) << "sockets: " << n_sockets();
  }

  const std::string port_ = std::to_string(::getpid());
  std::vector<pid_t> pids_;
};

/// Expects init_dist to throw Thrown with all of `parts` in its text.
template <class Thrown>
void expect_refusal(std::initializer_list<std::string> parts, milliseconds timeout = seconds(30)) {
  const std::string text = test::thrown<Thrown>([&] { init_dist({.timeout = timeout}); });
  for (const std::string& part : parts) test::expect_contains(text, part);
}

std::int64_t sum_of_ranks() {
  std::int64_t sum = get_rank();
  all_reduce(std::span(&sum, 1));
  return sum;
}

sockaddr_un address_of(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return address;
}

socklen_t bytes_of(const std::string& name) {
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

constexpr uid_t kNobody = 65534;

TEST_F(BootstrapTest, ranks_that_inherited_nothing_share_memory) {
  for (int rank = 3; rank >= 0; --rank) {
    start_rank(rank, 4, [rank] {
      init_dist();
      EXPECT_EQ(get_backend(), "shared");
      EXPECT_EQ(get_rank(), rank);
      EXPECT_EQ(get_local_size(), 4);
      EXPECT_EQ(sum_of_ranks(), 6);
      destroy_dist();
    });
  }
  expect_all_pass();
}

TEST_F(BootstrapTest, a_world_of_one_needs_no_bootstrap) {
  start_rank(0, 1, [] {
    init_dist({.backend = "shared"});
    EXPECT_EQ(sum_of_ranks(), 0);
  });
  expect_all_pass();
}

TEST_F(BootstrapTest, one_world_after_another) {
  for (int rank = 0; rank < 3; ++rank) {
    start_rank(rank, 3, [rank] {
      for (int i = 0; i < 50; ++i) {
        init_dist();
        EXPECT_EQ(sum_of_ranks(), 3);
        // A late rank finds the next bootstrap in progress, or delays it; the result is the same.
        if (i % 3 == rank) std::this_thread::sleep_for(milliseconds(3));
        destroy_dist();
      }
    });
  }
  expect_all_pass();
}

TEST_F(BootstrapTest, missing_rank_is_named_on_all) {
  const auto refused = [](milliseconds timeout) {
    expect_refusal<TimeoutError>({"rank 2 of 4 did not connect"}, timeout);
  };
  start_rank(0, 4, [=] { refused(seconds(30)); });
  const pid_t other = start_rank(3, 4, [=] { refused(seconds(30)); });
  wait_for_sockets(2);
  EXPECT_TRUE(test::wait_until_asleep(other));  // it has sent its hello and waits
  start_rank(1, 4, [=] { refused(milliseconds(500)); });
  expect_all_pass();
}

TEST_F(BootstrapTest, shortest_timeout_ends_it_for_all) {
  start_rank(0, 3, [] { expect_refusal<TimeoutError>({"rank 2 of 3 did not connect"}); });
  wait_for_sockets(1);
  start_rank(1, 3, [] {
    expect_refusal<TimeoutError>({"rank 2 of 3 did not connect"}, milliseconds(300));
  });
  expect_all_pass();
}

TEST_F(BootstrapTest, missing_rank_0_is_named) {
  start_rank(1, 2, [] {
    expect_refusal<TimeoutError>({"rank 0 of 2 did not connect", "MASTER_PORT"}, milliseconds(300));
  });
  expect_all_pass();
}

// The launcher said that they are on one host.
TEST_F(BootstrapTest, ranks_in_separate_network_namespaces_are_reported) {
  if (const auto why = test::missing_namespaces(); !why.empty()) GTEST_SKIP() << why;
  for (const int rank : {0, 1}) {
    start_rank(rank, 2, [rank] {
      ASSERT_EQ(::unshare(CLONE_NEWNET), 0);
      expect_refusal<TimeoutError>({fmt::format("rank {} of 2 did not connect", 1 - rank),
                                    "in a separate container (network namespace)?"},
                                   milliseconds(500));
    });
  }
  expect_all_pass();
}

TEST_F(BootstrapTest, rank_0_killed_in_the_bootstrap_is_lost) {
  const pid_t leader = start_rank(0, 3, [] { init_dist(); });
  start_rank(1, 3, [leader] {
    expect_refusal<PeerLost>({fmt::format("rank 0 (process {}) died", leader)});
  });
  wait_for_sockets(2);
  ::kill(leader, SIGKILL);
  wait_for(leader);
  expect_all_pass();
}

TEST_F(BootstrapTest, another_rank_killed_in_the_bootstrap_is_lost) {
  const pid_t victim = start_rank(2, 4, [] { init_dist(); });
  for (const int rank : {0, 1}) {
    start_rank(rank, 4, [victim] {
      expect_refusal<PeerLost>({fmt::format("rank 2 (process {}) died", victim)});
    });
  }
  wait_for_sockets(3);
  EXPECT_TRUE(test::wait_until_asleep(victim));  // it has sent its hello and waits
  ::kill(victim, SIGKILL);
  wait_for(victim);
  expect_all_pass();
}

TEST_F(BootstrapTest, a_rank_that_rank_0_has_not_accepted_yet_is_told_who_died) {
  const pid_t victim = start_rank(2, 4, [] { init_dist(); });
  const auto rank_2_died = [victim] {
    expect_refusal<PeerLost>({fmt::format("rank 2 (process {}) died", victim)});
  };
  const pid_t leader = start_rank(0, 4, rank_2_died);
  wait_for_sockets(2);
  EXPECT_TRUE(test::wait_until_asleep(victim));  // it has sent its hello and waits
  EXPECT_TRUE(test::wait_until_asleep(leader));  // it has read that
  ::kill(leader, SIGSTOP);
  EXPECT_TRUE(test::wait_until([leader] { return test::thread_state(leader) == 'T'; }));
  ::kill(victim, SIGKILL);
  wait_for(victim);
  EXPECT_TRUE(test::wait_until_asleep(start_rank(1, 4, rank_2_died)));  // waits for the reply
  ::kill(leader, SIGCONT);
  expect_all_pass();
}

TEST_F(BootstrapTest, rank_0_that_is_stopped_is_named_at_the_limit) {
  const pid_t leader = start_rank(0, 3, [] { expect_refusal<PeerLost>({"rank 1 (process "}); });
  wait_for_sockets(1);
  EXPECT_TRUE(test::wait_until_asleep(leader));
  ::kill(leader, SIGSTOP);
  EXPECT_TRUE(test::wait_until([leader] { return test::thread_state(leader) == 'T'; }));
  const pid_t follower = start_rank(1, 3, [leader] {
    expect_refusal<TimeoutError>(
        {fmt::format("rank 0 (process {}) is stopped by a signal or a debugger, and has sent "
                     "nothing for ",
                     leader),
         fmt::format(" s, with a limit of 0.5 s; kill -CONT {}", leader)},
        milliseconds(500));
  });
  EXPECT_EQ(wait_for(follower), 0);
  ::kill(leader, SIGCONT);
  expect_all_pass();
}

TEST_F(BootstrapTest, a_rank_waits_for_its_own_rank_0_if_another_job_has_the_name) {
  const auto sum = [] {
    init_dist();
    EXPECT_EQ(sum_of_ranks(), 1);
  };
  start_rank(1, 2, sum);  // first: a fork would keep the listener
  {                       // the other job's rank 0 is complete without it
    base::UniqueFd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    const sockaddr_un address = address_of(name());
    ASSERT_EQ(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), bytes_of(name())),
              0);
    ASSERT_EQ(::listen(listener.get(), 1), 0);
    const base::UniqueFd rank(::accept(listener.get(), nullptr, nullptr));
    listener.reset();
    bootstrap_protocol::Hello hello{};
    EXPECT_EQ(::recv(rank.get(), &hello, sizeof hello, 0), static_cast<ssize_t>(sizeof hello));
    bootstrap_protocol::Reply reply{};
    reply.greeting = bootstrap_protocol::kGreeting;
    reply.failure = bootstrap_protocol::kOtherRanks;
    EXPECT_EQ(::send(rank.get(), &reply, sizeof reply, 0), static_cast<ssize_t>(sizeof reply));
  }
  start_rank(0, 2, sum);
  expect_all_pass();
}

TEST_F(BootstrapTest, rank_0_tells_others_that_its_ranks_are_complete) {
  const auto join = [] { init_dist(); };
  start_rank(0, 2, join);
  wait_for_sockets(1);
  base::UniqueFd other(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const sockaddr_un address = address_of(name());
  ASSERT_EQ(::connect(other.get(), reinterpret_cast<const sockaddr*>(&address), bytes_of(name())),
            0);
  start_rank(1, 2, join);
  bootstrap_protocol::Reply reply{};
  EXPECT_EQ(::recv(other.get(), &reply, sizeof reply, 0), static_cast<ssize_t>(sizeof reply));
  EXPECT_EQ(reply.failure, bootstrap_protocol::kOtherRanks);
  other.reset();
  expect_all_pass();
}

TEST_F(BootstrapTest, a_rank_killed_after_the_bootstrap_is_lost) {
  const pid_t victim = start_rank(1, 3, [] {
    init_dist();
    barrier();
    ::raise(SIGKILL);
  });
  for (const int rank : {0, 2}) {
    start_rank(rank, 3, [] {
      init_dist();
      barrier();
      EXPECT_THROW(barrier(), PeerLost);
    });
  }
  EXPECT_EQ(wait_for(victim), SIGKILL);
  expect_all_pass();
}

TEST_F(BootstrapTest, sizes_that_differ_are_a_mismatch) {
  start_rank(0, 2, [] { expect_refusal<MismatchError>({"rank 1 of 3", "a world of 2"}); });
  start_rank(1, 3, [] { expect_refusal<MismatchError>({"rank 1 of 3", "a world of 2"}); });
  expect_all_pass();
}

TEST_F(BootstrapTest, a_rank_of_another_version_is_rejected_by_both_versions) {
  const std::string text =
      fmt::format("links lockstep 9.8.7 (layout 0000beef), and rank 0 lockstep");
  start_rank(0, 3, [&] { expect_refusal<MismatchError>({text}); });
  start_rank(1, 3, [&] { expect_refusal<MismatchError>({text}); });
  const std::string leader = name();
  wait_for_sockets(2);
  start([&leader] {
    const base::UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET, 0));
    const sockaddr_un address = address_of(leader);
    EXPECT_TRUE(test::wait_until([&] {
      return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address),
                       bytes_of(leader)) == 0;
    }));
    // Only the first members of the message of that version are known.
    bootstrap_protocol::Hello hello{.greeting = bootstrap_protocol::kGreeting,
                                    .layout = 0xbeef,
                                    .release = {"9.8.7"},
                                    .rank = 77,
                                    .n_ranks = 0,
                                    .pid = 0,
                                    .timeout_ms = 0,
                                    .job = {}};
    const std::size_t n_bytes = sizeof hello - 8;
    EXPECT_EQ(::send(socket.get(), &hello, n_bytes, 0), static_cast<ssize_t>(n_bytes));
    char byte = 0;
    EXPECT_GE(::recv(socket.get(), &byte, 1, 0), 0);  // refused, or closed
  });
  expect_all_pass();
}

volatile std::sig_atomic_t n_interrupts = 0;

// As those of an interval timer, without SA_RESTART.
TEST_F(BootstrapTest, signals_at_rank_0_while_a_rank_joins) {
  struct sigaction action {};
  action.sa_handler = [](int) { n_interrupts = n_interrupts + 1; };
  struct sigaction before {};
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &before), 0);
  std::atomic<pid_t> leader_id = 0;
  std::atomic<bool> has_ended = false;
  std::shared_ptr<Membership> membership;
  std::thread leader([&] {
    leader_id = ::gettid();
    const Call barrier{.op = Op::barrier,
                       .group = "world",
                       .sequence = 1,
                       .timeout = seconds(60),
                       .where = std::source_location::current()};
    membership = bootstrap(port_, /*rank=*/0, /*n_ranks=*/2, barrier);
    has_ended = true;
  });
  const std::string leader_name = bootstrap_socket_name(port_);
  const base::UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const sockaddr_un address = address_of(leader_name);
  EXPECT_TRUE(test::wait_until([&] {
    return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address),
                     bytes_of(leader_name)) == 0;
  }));
  bootstrap_protocol::Hello hello{.greeting = bootstrap_protocol::kGreeting,
                                  .layout = base::layout_version(),
                                  .release = {},
                                  .rank = 1,
                                  .n_ranks = 2,
                                  .pid = ::getpid(),
                                  .timeout_ms = 60'000,
                                  .job = {}};
  base::copy_text(hello.job, port_);
  EXPECT_EQ(::send(socket.get(), &hello, sizeof hello, 0), static_cast<ssize_t>(sizeof hello));
  bootstrap_protocol::Reply reply{};
  EXPECT_EQ(::recv(socket.get(), &reply, sizeof reply, 0), static_cast<ssize_t>(sizeof reply));
  EXPECT_EQ(reply.failure, 0U);
  const auto wait_until_it_waits = [&] {
    EXPECT_TRUE(test::wait_until([&] { return test::is_asleep(leader_id) || has_ended; }));
  };
  for (int i = 1; i <= 3; ++i) {  // rank 0 waits for the word that this rank has joined
    wait_until_it_waits();
    if (has_ended) break;
    ::pthread_kill(leader.native_handle(), SIGUSR1);
    EXPECT_TRUE(test::wait_until([&] { return n_interrupts >= i || has_ended; }));
  }
  wait_until_it_waits();
  ::send(socket.get(), bootstrap_protocol::kJoined.data(), bootstrap_protocol::kJoined.size(),
         MSG_NOSIGNAL);
  leader.join();
  ::sigaction(SIGUSR1, &before, nullptr);
  EXPECT_EQ(membership->segment().rank(1).state.load(), RankState::absent)
      << base::text_in(membership->segment().rank(1).failure);
}

TEST_F(BootstrapTest, a_rank_that_cannot_write_its_trace_tells_the_others_why) {
  for (const int culprit : {0, 1}) {
    const test::SharedCount n_told;
    const std::string file = fmt::format("/proc/rank-{}", culprit);
    for (const int rank : {0, 1, 2}) {
      start_rank(rank, 3, [&, rank] {
        if (rank == culprit) {
          ::setenv("LOCKSTEP_TRACE", "/proc", 1);
          expect_refusal<SystemError>({file.c_str()});
          EXPECT_TRUE(n_told.wait_for(2));
          return;
        }
        init_dist();
        test::expect_contains(test::thrown<PeerFailed>([] { barrier(); }), file);
        n_told.raise();
      });
    }
    expect_all_pass();
  }
}

TEST_F(BootstrapTest, rank_0_without_memory_for_the_segment_is_named) {
  start_rank(0, 3, [] {
    const rlimit limit{.rlim_cur = 4096, .rlim_max = 4096};  // files of memory are limited too
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    expect_refusal<SystemError>({"cannot reserve", "(ulimit -f)"});
  });
  for (const int rank : {1, 2}) {
    start_rank(rank, 3, [] {
      expect_refusal<PeerFailed>({"rank 0 failed: cannot reserve", "(ulimit -f)"});
    });
  }
  expect_all_pass();
}

TEST_F(BootstrapTest, two_processes_of_one_rank_are_a_mismatch) {
  start_rank(0, 3, [] { expect_refusal<MismatchError>({"two processes are rank 1"}); });
  for (int i = 0; i < 2; ++i) {
    start_rank(1, 3, [] { expect_refusal<MismatchError>({"two processes are rank 1"}); });
  }
  expect_all_pass();
}

/// This process can open n more.
void limit_descriptors_to(int n) {
  const int next = ::dup(0);
  ::close(next);
  const rlimit limit{.rlim_cur = static_cast<rlim_t>(next + n),
                     .rlim_max = static_cast<rlim_t>(next + n)};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST_F(BootstrapTest, only_rank_0_without_descriptors_for_all_is_named) {
  constexpr int kRanks = 8;
  start_rank(0, kRanks, [] {
    limit_descriptors_to(4);  // the listening socket, and three ranks
    expect_refusal<SystemError>({"rank 0 (process ", "(ulimit -n)", "(errno 24)"});
  });
  for (int rank = 1; rank < kRanks; ++rank) {
    start_rank(rank, kRanks, [] {
      expect_refusal<SystemError>({"rank 0 (process ", "(ulimit -n)", "(errno 24)"});
    });
  }
  expect_all_pass();
}

TEST_F(BootstrapTest, a_rank_without_a_descriptor_for_the_segment_is_named) {
  if (test::kSanitizerNeedsDescriptors) {
    GTEST_SKIP() << "UndefinedBehaviorSanitizer needs a descriptor";
  }
  for (const int rank : {0, 1, 2}) {
    start_rank(rank, 3, [rank] {
      if (rank == 2) {
        limit_descriptors_to(1);  // the socket
        expect_refusal<SystemError>({"no descriptor is left", "(ulimit -n)", "(errno 24)"});
      } else {
        expect_refusal<PeerFailed>({"rank 2 failed: no descriptor is left", "(ulimit -n)"});
      }
    });
  }
  expect_all_pass();
}

// A pidfd tells a zombie from a process that lives, without /proc and without a launcher.
TEST_F(BootstrapTest, without_proc_a_late_rank_is_late_and_a_killed_one_lost) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can hide /proc";
  const auto hide_proc = [] {
    ASSERT_EQ(::unshare(CLONE_NEWNS), 0);
    ASSERT_EQ(::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
    ASSERT_EQ(::mount("none", "/proc", "tmpfs", 0, "size=4k"), 0);
  };
  const pid_t victim = start_rank(1, 2, [hide_proc] {
    hide_proc();
    init_dist();
    const Group group = default_group().duplicate();
    ::pause();
  });
  const pid_t other = start_rank(0, 2, [hide_proc, victim] {
    hide_proc();
    init_dist();
    const Group group = default_group().duplicate();
    EXPECT_THROW(group.barrier(milliseconds(200)), TimeoutError);
    ::kill(victim, SIGKILL);
    EXPECT_THROW(barrier(), PeerLost);
  });
  EXPECT_EQ(wait_for(other), 0);
  EXPECT_EQ(wait_for(victim), SIGKILL);
  expect_all_pass();
}

TEST_F(BootstrapTest, a_name_that_another_user_holds_is_rejected) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user too";
  const std::string taken = name();
  const pid_t stranger = start([&taken] {
    ASSERT_EQ(::setuid(kNobody), 0);
    const base::UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET, 0));
    const sockaddr_un address = address_of(taken);
    ASSERT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), bytes_of(taken)),
              0);
    ASSERT_EQ(::listen(socket.get(), 8), 0);
    ::pause();
  });
  wait_for_sockets(1);
  for (int rank = 0; rank < 2; ++rank) {
    const pid_t pid = start_rank(rank, 2, [stranger] {
      expect_refusal<EngineError>({fmt::format("process {} of user 65534", stranger)});
    });
    EXPECT_EQ(wait_for(pid), 0);
  }
  ::kill(stranger, SIGKILL);
  wait_for(stranger);
  expect_all_pass();
}

TEST_F(BootstrapTest, another_user_receives_nothing) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user too";
  const std::string open = name();
  start_rank(0, 2, [] {
    init_dist();
    EXPECT_EQ(sum_of_ranks(), 1);
  });
  wait_for_sockets(1);
  const pid_t stranger = start([&open] {
    ASSERT_EQ(::setuid(kNobody), 0);
    const base::UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET, 0));
    const sockaddr_un address = address_of(open);
    EXPECT_TRUE(test::wait_until([&] {  // bound, but perhaps not listening yet
      return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), bytes_of(open)) ==
             0;
    }));
    char byte = 0;
    EXPECT_LE(::recv(socket.get(), &byte, 1, 0), 0);
  });
  EXPECT_EQ(wait_for(stranger), 0);
  start_rank(1, 2, [] {
    init_dist();
    EXPECT_EQ(sum_of_ranks(), 1);
  });
  expect_all_pass();
}

}  // namespace
}  // namespace lockstep::shared
