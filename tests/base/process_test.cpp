#include "base/process.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <thread>

#include "base/fd.hpp"
#include "base/guarded_fd.hpp"

namespace lockstep::base {
namespace {

UniqueFd temporary_file() {
  char path[] = "/tmp/lockstep-process-XXXXXX";
  UniqueFd fd(::mkostemp(path, O_CLOEXEC));
  ::unlink(path);
  return fd;
}

enum class By : std::uint8_t { inode, pidfd, proc };

/// With a pidfd identified by its inode or by /proc, and by /proc alone.
class WatchedProcessTest : public testing::TestWithParam<By> {
 protected:
  ~WatchedProcessTest() override {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  WatchedProcess start(const std::function<void()>& body) {
    std::fflush(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::alarm(60);  // the watchdog
      body();
      ::_exit(0);
    }
    return {{.pid = pid_,
             .start_time = process_start_time(pid_),
             .pidfd_inode = GetParam() == By::inode ? pidfd_inode(pid_) : 0},
            /*keeps_pidfd=*/GetParam() != By::proc};
  }
  void wait_until(const WatchedProcess& process, ProcessState state) {
    while (process.state(spare_) != state) std::this_thread::yield();
  }
  /// Until it is a zombie.
  void wait_for_end() const {
    siginfo_t info{};
    ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT), 0);
  }
  void reap() {
    ASSERT_EQ(::waitpid(pid_, nullptr, 0), pid_);
    pid_ = 0;
  }

  GuardedFd file_{temporary_file()};
  ReservedFd spare_{file_};
  pid_t pid_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Base, WatchedProcessTest, testing::Values(By::inode, By::pidfd, By::proc),
                         [](const auto& setting) {
                           return setting.param == By::inode   ? "by_inode"
                                  : setting.param == By::pidfd ? "with_pidfd"
                                                               : "by_proc";
                         });

void pause_for_ever() {
  while (true) ::pause();
}

TEST_P(WatchedProcessTest, from_life_to_death) {
  const WatchedProcess process = start(pause_for_ever);
  wait_until(process, ProcessState::sleeping);
  EXPECT_FALSE(process.is_gone(spare_));
  ::kill(pid_, SIGSTOP);
  wait_until(process, ProcessState::stopped);
  EXPECT_FALSE(process.is_gone(spare_));
  ::kill(pid_, SIGKILL);
  wait_for_end();
  EXPECT_TRUE(process.is_gone(spare_)) << "a zombie";
  EXPECT_EQ(process.state(spare_), ProcessState::gone);
  reap();
  EXPECT_TRUE(process.is_gone(spare_));
}

TEST_P(WatchedProcessTest, main_thread_ends_first) {
  const WatchedProcess process = start([] {
    std::thread(pause_for_ever).detach();
    ::syscall(SYS_exit, 0);
  });
  wait_until(process, ProcessState::alive);
  EXPECT_FALSE(process.is_gone(spare_));
  ::kill(pid_, SIGKILL);
  wait_for_end();
  EXPECT_TRUE(process.is_gone(spare_));
}

TEST_P(WatchedProcessTest, no_descriptor_is_left) {
  const WatchedProcess process = start(pause_for_ever);
  wait_until(process, ProcessState::sleeping);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 3;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const bool is_gone = process.is_gone(spare_);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_FALSE(is_gone);
  ::kill(pid_, SIGKILL);
  wait_for_end();
  EXPECT_TRUE(process.is_gone(spare_));
}

// Kernels before 6.9 give all pidfds one inode.
TEST_P(WatchedProcessTest, a_pidfd_of_another_process_has_the_number) {
  if (GetParam() == By::proc) GTEST_SKIP() << "asks by /proc alone";
  const pid_t other = ::fork();
  if (other == 0) {
    ::alarm(60);
    pause_for_ever();
  }
  const UniqueFd foreign(static_cast<int>(::syscall(SYS_pidfd_open, other, 0)));
  ASSERT_TRUE(foreign);
  const WatchedProcess process = start(pause_for_ever);
  wait_until(process, ProcessState::sleeping);
  int number = 0;
  while (number < 1000 && !is_pidfd_of(number, pid_)) ++number;
  ASSERT_LT(number, 1000);
  EXPECT_FALSE(is_pidfd_of(foreign.get(), pid_));
  EXPECT_FALSE(is_pidfd_of(file_.get(), pid_));
  ASSERT_EQ(::dup2(foreign.get(), number), number);
  EXPECT_FALSE(is_pidfd_of(number, pid_));
  ::kill(other, SIGKILL);
  ::waitpid(other, nullptr, 0);
  EXPECT_FALSE(process.is_gone(spare_)) << "took another process's end for its own";
  ::kill(pid_, SIGKILL);
  wait_for_end();
  EXPECT_TRUE(process.is_gone(spare_));
  ::close(number);
}

TEST_P(WatchedProcessTest, another_process_has_the_pid) {
  if (GetParam() == By::proc) GTEST_SKIP() << "asks by /proc alone";
  start(pause_for_ever);
  const std::uint64_t inode = pidfd_inode(pid_);
  const std::uint64_t other = pidfd_inode(::getpid());
  if (inode == 0) GTEST_SKIP() << "Linux before 6.9: pidfds have no inodes of their own";
  EXPECT_NE(inode, other);
  EXPECT_EQ(inode, pidfd_inode(pid_));
  const std::uint64_t start_time = process_start_time(pid_);
  const auto is_gone = [&](std::uint64_t its_inode, std::uint64_t its_start) {
    return WatchedProcess({.pid = pid_, .start_time = its_start, .pidfd_inode = its_inode},
                          /*keeps_pidfd=*/true)
        .is_gone(spare_);
  };
  // The inode is right and alone decides; it is wrong, or missing, and /proc decides.
  EXPECT_FALSE(is_gone(inode, start_time + 100));
  EXPECT_TRUE(is_gone(other, start_time + 100));
  EXPECT_TRUE(is_gone(0, start_time + 100));
  EXPECT_FALSE(is_gone(other, start_time));
  EXPECT_FALSE(is_gone(0, start_time));
}

TEST(PidfdInodeTest, of_no_process) {
  EXPECT_EQ(pidfd_inode(0), 0U);
  EXPECT_EQ(pidfd_inode(-1), 0U);
}

TEST(ProcessStateTest, of_no_process) {
  EXPECT_EQ(process_state(0, 1), ProcessState::unknown);
  EXPECT_EQ(process_state(-1, 1), ProcessState::unknown);
  EXPECT_EQ(process_state(::getpid(), 0), ProcessState::unknown);
  EXPECT_EQ(process_state(::getpid(), process_start_time(::getpid())), ProcessState::running);
  // Another has the number now.
  EXPECT_EQ(process_state(::getpid(), process_start_time(::getpid()) + 2), ProcessState::gone);
}

TEST(GuardedFdTest, a_number_that_became_another_file_is_left_alone) {
  const UniqueFd other = temporary_file();
  const int number = ::fcntl(other.get(), F_DUPFD_CLOEXEC, 100);
  ASSERT_GE(number, 100);
  {
    const GuardedFd kept(UniqueFd(::fcntl(temporary_file().get(), F_DUPFD_CLOEXEC, 200)));
    ASSERT_TRUE(kept.is_intact());
    ASSERT_EQ(::dup2(other.get(), kept.get()), kept.get());
    EXPECT_FALSE(kept.is_intact());
  }
  EXPECT_GE(::fcntl(200, F_GETFD), 0) << "closed though it was not its own";
  ::close(200);
  {
    const GuardedFd kept{UniqueFd(number)};
    EXPECT_TRUE(kept.is_intact());
  }
  EXPECT_LT(::fcntl(number, F_GETFD), 0);
}

}  // namespace
}  // namespace lockstep::base
