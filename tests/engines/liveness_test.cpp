// A rank that is late and cannot be seen is late, not lost.

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <string>
#include <thread>
#include <vector>

#include "engines/shared/bootstrap/job.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/shared/protocol/channel.hpp"
#include "engines/shared/segment/membership.hpp"
#include "support/expect.hpp"
#include "support/namespaces.hpp"
#include "support/sanitizers.hpp"
#include "support/seccomp.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;

/// Two ranks as under `lockstep run`, of which rank 1 joins after rank 0 has timed out.
class LivenessTest : public testing::Test {
 protected:
  LivenessTest() { EXPECT_EQ(::pipe2(pipe_, O_CLOEXEC | O_NONBLOCK), 0); }
  ~LivenessTest() override {
    for (const int fd : pipe_) ::close(fd);
  }

  using Step = std::function<void(int rank)>;

  /// The error text of rank 0, which must report that rank 1 is late. prepare: called before a rank
  /// joins; waste: when both have.
  std::string text_of_a_late_peer(const Step& prepare, const Step& waste) {
    const shared::Job job(2);
    std::fflush(nullptr);
    std::vector<pid_t> pids;
    for (int rank = 0; rank < 2; ++rank) {
      const pid_t pid = ::fork();
      if (pid == 0) be_rank(rank, job.environment(), prepare, waste);
      pids.push_back(pid);
    }
    for (const pid_t pid : pids) {
      int status = -1;
      EXPECT_EQ(::waitpid(pid, &status, 0), pid);
      EXPECT_EQ(status, 0);
    }
    std::string text(4096, '\0');
    const ssize_t n = ::read(pipe_[0], text.data(), text.size());
    text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    return text;
  }

  /// The caller goes on as a child, after which this process ends too: a new PID or time namespace
  /// is that of the next child.
  static void go_on_in_child() {
    const pid_t child = ::fork();
    if (child == 0) return;
    int status = -1;
    ::waitpid(child, &status, 0);
    ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 99);
  }

  /// Runs body as the first process of a PID namespace, with the /proc of the one outside.
  static void in_one_pid_namespace(const std::function<void()>& body) {
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::unshare(CLONE_NEWPID);
      go_on_in_child();
      body();
      std::fflush(nullptr);
      ::_exit(HasFailure() ? 1 : 0);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
  }

  bool rank_1_ends_its_main_thread_ = false;

 private:
  [[noreturn]] void be_rank(int rank, const std::string& segment, const Step& prepare,
                            const Step& waste) {
    ::alarm(60);  // the watchdog
    for (const char* name : {"RANK", "LOCAL_RANK"}) {
      ::setenv(name, std::to_string(rank).c_str(), 1);
    }
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) ::setenv(name, "2", 1);
    ::setenv("LOCKSTEP_SEGMENT", segment.c_str(), 1);
    try {
      prepare(rank);
      init_dist({.backend = "shared"});
      const Group world = default_group();
      const Group told = world.duplicate();
      world.barrier();
      waste(rank);
      if (rank == 0 || !rank_1_ends_its_main_thread_) finish(world, told);
      std::thread([this, world, told] { finish(world, told); }).detach();
      ::syscall(SYS_exit, 0);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
    }
    std::fflush(nullptr);
    ::_exit(1);
  }

  [[noreturn]] void finish(const Group& world, const Group& told) const {
    try {
      if (world.rank() == 0) expect_late(world);
      told.barrier();
      EXPECT_THROW(world.barrier(), TimeoutError);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << world.rank() << ": " << error.what();
    }
    std::fflush(nullptr);
    ::_exit(HasFailure() ? 1 : 0);
  }

  void expect_late(const Group& world) const {
    try {
      world.barrier(milliseconds(200));
      ADD_FAILURE() << "no error";
    } catch (const TimeoutError& error) {
      const std::string text = error.what();
      expect_contains(text, "waited 0.2 s for rank 1 of 2");
      EXPECT_EQ(::write(pipe_[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
    }
  }

  int pipe_[2] = {-1, -1};
};

/// By /proc, which knows more than whether it lives.
void expect_seen(const std::string& text) {
  EXPECT_TRUE(text.find("rank 1 is sleeping (pid ") != std::string::npos ||
              text.find("rank 1 is running (pid ") != std::string::npos)
      << text;
}

void do_nothing(int /*rank*/) {}

void use_up_descriptors(int /*rank*/) {
  while (::fcntl(0, F_DUPFD, 0) >= 0) {
  }
  EXPECT_EQ(errno, EMFILE);
}

void limit_descriptors(int /*rank*/) {
  const rlimit limit{.rlim_cur = 128, .rlim_max = 128};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

void hide_proc(int /*rank*/) {
  ASSERT_EQ(::unshare(CLONE_NEWNS), 0);
  ASSERT_EQ(::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
  ASSERT_EQ(::mount("none", "/proc", "tmpfs", 0, "size=4k"), 0);
}

void forbid_pidfds(int /*rank*/) { forbid(SYS_pidfd_open); }

/// Whether root may: inside of most containers it may not.
bool can_unshare(int flags) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(::unshare(flags) == 0 ? 0 : 1);
  int status = -1;
  return ::waitpid(pid, &status, 0) == pid && status == 0;
}

#define SKIP_UNLESS_CAN_UNSHARE(flags) \
  if (!can_unshare(flags)) GTEST_SKIP() << "this process may make no " #flags

TEST_F(LivenessTest, seen) { expect_seen(text_of_a_late_peer(do_nothing, do_nothing)); }

TEST_F(LivenessTest, without_free_descriptor) {
  if (test::kSanitizerNeedsDescriptors) {
    GTEST_SKIP() << "UndefinedBehaviorSanitizer needs a descriptor";
  }
  expect_seen(text_of_a_late_peer(limit_descriptors, use_up_descriptors));  // by the spare one
}

TEST_F(LivenessTest, without_free_descriptor_and_pidfd) {
  if (test::kSanitizerNeedsDescriptors) {
    GTEST_SKIP() << "UndefinedBehaviorSanitizer needs a descriptor";
  }
  const auto prepare = [](int rank) {
    limit_descriptors(rank);
    forbid_pidfds(rank);
  };
  expect_seen(text_of_a_late_peer(prepare, use_up_descriptors));
}

TEST_F(LivenessTest, without_proc) {
  SKIP_UNLESS_CAN_UNSHARE(CLONE_NEWNS);
  const std::string text = text_of_a_late_peer(hide_proc, do_nothing);
  expect_contains(text, "rank 1 may be alive or dead");
}

TEST_F(LivenessTest, with_a_proc_that_is_gone_later) {
  SKIP_UNLESS_CAN_UNSHARE(CLONE_NEWNS);
  const std::string text = text_of_a_late_peer(do_nothing, hide_proc);
  expect_contains(text, "rank 1 is alive (pid ");  // says the pidfd
}

TEST_F(LivenessTest, in_pid_and_ipc_namespaces_of_their_own) {
  constexpr int kNamespaces = CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNS;
  SKIP_UNLESS_CAN_UNSHARE(kNamespaces);
  const auto prepare = [](int) {
    ASSERT_EQ(::unshare(kNamespaces), 0);
    go_on_in_child();
    EXPECT_EQ(::getpid(), 1);
    ASSERT_EQ(::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
    ASSERT_EQ(::mount("proc", "/proc", "proc", 0, nullptr), 0);
  };
  expect_contains(text_of_a_late_peer(prepare, do_nothing), "cannot be seen from here");
}

// Its pids are other processes there.
TEST_F(LivenessTest, in_one_pid_namespace_with_the_proc_of_another) {
  SKIP_UNLESS_CAN_UNSHARE(CLONE_NEWPID);
  in_one_pid_namespace([this] {
    expect_contains(text_of_a_late_peer(do_nothing, do_nothing), "rank 1 is alive (pid ");
  });
}

TEST_F(LivenessTest, in_time_namespaces_of_their_own) {
  if (const auto why = missing_time_namespaces(); !why.empty()) GTEST_SKIP() << why;
  SKIP_UNLESS_CAN_UNSHARE(CLONE_NEWTIME);
  const auto prepare = [](int rank) {
    ASSERT_EQ(::unshare(CLONE_NEWTIME), 0);
    std::ofstream("/proc/self/timens_offsets")
        << fmt::format("monotonic {0} 0\nboottime {0} 0\n", rank * 50'000);
    go_on_in_child();
  };
  const SharedCount waiting;
  const auto wait_for_its_call = [&](int rank) {
    if (rank == 1) return waiting.store(::gettid());
    EXPECT_TRUE(waiting.wait_for(1));
    EXPECT_TRUE(wait_until_asleep(waiting.value()));
  };
  const std::string text = text_of_a_late_peer(prepare, wait_for_its_call);
  expect_seen(text);
  expect_contains(text, "now in barrier #1 on group 'world/1.0' at ");
  EXPECT_EQ(text.find(" for 50"), std::string::npos) << text;
  EXPECT_EQ(text.find(" for 49"), std::string::npos) << text;
}

/// A rank may live in another thread than the main one.
TEST_F(LivenessTest, whose_main_thread_has_ended) {
  rank_1_ends_its_main_thread_ = true;
  expect_contains(text_of_a_late_peer(do_nothing, do_nothing), "rank 1 is alive (pid ");
}

TEST_F(LivenessTest, main_thread_ended_without_pidfd) {
  rank_1_ends_its_main_thread_ = true;
  expect_contains(text_of_a_late_peer(forbid_pidfds, do_nothing), "rank 1 is alive (pid ");
}

/// Two processes that share a channel, without the calls of a Group around its phases. Rank 1 is
/// traced, and executed instruction by instruction.
class TracedPeer {
 public:
  enum class End { killed, stopped };

  /// Rank 0 sleeps in the first phase until rank 1 has raised its flag and executed n_instructions
  /// more. Then rank 1 is killed, or stays stopped. Rank 0 must complete the phase, and miss rank 1
  /// in the next one. Returns whether rank 1 may be traced.
  static bool end(End how, int n_instructions) {
    shared::Job job(2);
    const SharedCount asleep;
    int ends[2];  // rank 1 writes the address of its flag
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    std::fflush(nullptr);
    pid_t pids[2];
    for (int rank = 0; rank < 2; ++rank) {
      pids[rank] = ::fork();
      if (pids[rank] == 0) be_rank(rank, job.environment(), how, asleep, ends[1]);
    }
    const bool is_traced = trace(job, how, n_instructions, asleep, ends[0], pids);
    ::kill(pids[1], SIGKILL);
    ::waitpid(pids[1], nullptr, 0);
    for (const int fd : ends) ::close(fd);
    return is_traced;
  }

 private:
  static constexpr int kNotTraced = 77;

  [[noreturn]] static void be_rank(int rank, const std::string& segment, End how,
                                   const SharedCount& asleep, int out) {
    try {
      const auto membership =
          std::make_shared<shared::Membership>(shared::inherit_world(segment), rank);
      shared::Channel channel(membership, membership->segment().header().world_channel, rank, 2);
      Call call{.op = Op::barrier,
                .group = "world",
                .sequence = 1,
                .timeout = std::chrono::minutes(10),
                .where = std::source_location::current()};
      channel.begin(call);
      if (rank == 1) {
        const auto flag = reinterpret_cast<std::uintptr_t>(channel.write_slot(call, 0)) -
                          offsetof(shared::Flag, payload);
        if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(kNotTraced);
        EXPECT_EQ(::write(out, &flag, sizeof flag), static_cast<ssize_t>(sizeof flag));
        ::raise(SIGSTOP);
        channel.end_phase(call);
        ::_exit(0);
      }
      asleep.store(::gettid());
      channel.end_phase(call);
      channel.end();
      call.sequence = 2;
      if (how == End::stopped) call.timeout = milliseconds(20);
      try {
        channel.begin(call);
        channel.end_phase(call);
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        const bool is_right = how == End::killed
                                  ? dynamic_cast<const PeerLost*>(&error) != nullptr
                                  : dynamic_cast<const TimeoutError*>(&error) != nullptr;
        EXPECT_TRUE(is_right) << error.what();
        EXPECT_EQ(error.context().peers, std::vector<int>{1}) << error.what();
      }
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
    }
    std::fflush(nullptr);
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }

  static bool trace(shared::Job& job, End how, int n_instructions, const SharedCount& asleep,
                    int in, const pid_t (&pids)[2]) {
    int status = 0;
    EXPECT_EQ(::waitpid(pids[1], &status, 0), pids[1]);
    if (!WIFSTOPPED(status)) {
      ::kill(pids[0], SIGKILL);
      ::waitpid(pids[0], nullptr, 0);
      EXPECT_EQ(WEXITSTATUS(status), kNotTraced);
      return false;
    }
    std::uintptr_t flag = 0;
    EXPECT_EQ(::read(in, &flag, sizeof flag), static_cast<ssize_t>(sizeof flag));
    EXPECT_TRUE(wait_until([&] { return asleep.value() != 0; }) &&
                wait_until_asleep(asleep.value()));
    const auto step = [&] {
      EXPECT_EQ(::ptrace(PTRACE_SINGLESTEP, pids[1], nullptr, nullptr), 0);
      return ::waitpid(pids[1], &status, 0) == pids[1] && WIFSTOPPED(status);
    };
    // A PEEK may return any word, so the flag itself says whether it failed: it stays 0.
    while (::ptrace(PTRACE_PEEKDATA, pids[1], flag, nullptr) == 0) {
      if (!step()) {
        ADD_FAILURE() << "rank 1 has ended before it raised its flag";
        break;
      }
    }
    for (int i = 0; i < n_instructions; ++i) EXPECT_TRUE(step());
    if (how == End::killed) {
      ::kill(pids[1], SIGKILL);
      EXPECT_EQ(::waitpid(pids[1], &status, 0), pids[1]);
      job.rank_ended(1, status);
    }
    const bool has_ended = wait_until(
        [&] { return ::waitpid(pids[0], &status, WNOHANG) == pids[0]; }, std::chrono::seconds(30));
    EXPECT_TRUE(has_ended) << "rank 0 hangs where rank 1 ends " << n_instructions
                           << " instructions after it raised its flag";
    if (has_ended) {
      EXPECT_EQ(status, 0);
    } else {
      ::kill(pids[0], SIGKILL);
      ::waitpid(pids[0], nullptr, 0);
    }
    return true;
  }
};

class TracedPeerTest : public testing::TestWithParam<TracedPeer::End> {};

INSTANTIATE_TEST_SUITE_P(, TracedPeerTest,
                         testing::Values(TracedPeer::End::killed, TracedPeer::End::stopped),
                         [](const auto& how) {
                           return how.param == TracedPeer::End::killed ? "killed" : "stopped";
                         });

// More than an oversubscribed rank executes from its flag to its first poll.
TEST_P(TracedPeerTest, that_ends_at_any_instruction_of_a_phase_is_missed_in_the_next) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the instructions of a sanitizer are not those of the phase";
#endif
  constexpr int kMax = 40;
  for (int n = 0; n <= kMax && !HasFailure(); ++n) {
    if (!TracedPeer::end(GetParam(), n)) GTEST_SKIP() << "this machine has no ptrace";
  }
}

}  // namespace
}  // namespace lockstep::test
