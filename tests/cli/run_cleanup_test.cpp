#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <regex>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/sanitizers.hpp"
#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

StartOptions start_of(const std::vector<std::string>& options, const std::string& text) {
  StartOptions start{.arguments = script(options, text)};
  start.arguments.insert(start.arguments.begin(), "run");
  return start;
}

// Ranks that end on nothing but SIGKILL, and so do the programs they started.
constexpr const char* kFamily =
    "trap '' TERM INT HUP; sleep 1000 & (sleep 1000 & sleep 1000) & echo \"pid $$.\"; wait";

TEST(RunCleanupTest, kill_9_of_a_rank) {
  Command command(start_of({"-n", "3"}, "echo \"pid $$ of $RANK.\"; exec sleep 1000"));
  command.read_until("pid", 3);
  const std::size_t at = command.out().find(" of 1.");
  const std::string before = command.out().substr(0, at);
  kill(std::stoi(before.substr(before.rfind(' ') + 1)), SIGKILL);
  const Ended ended = command.wait();
  EXPECT_EQ(ended.exit_code, 137);
  EXPECT_NE(ended.err.find("rank 1 (pid "), std::string::npos) << ended.err;
  EXPECT_NE(ended.err.find("killed by SIGKILL (signal 9"), std::string::npos) << ended.err;
  command.expect_nothing_left();
}

TEST(RunCleanupTest, kill_9_of_a_rank_with_children) {
  Command command(start_of({"-n", "2", "--grace", "0.2"}, kFamily));
  command.read_until("pid", 2);
  kill(std::stoi(command.out().substr(4)), SIGKILL);
  EXPECT_EQ(command.wait().exit_code, 137);
  command.expect_nothing_left();
}

TEST(RunCleanupTest, kill_9_of_the_launcher) {
  Command command(start_of({"-n", "4"}, "trap '' TERM INT HUP; echo ready; exec sleep 1000"));
  command.read_until("ready", 4);
  command.send(SIGKILL);
  EXPECT_EQ(command.wait().signal, SIGKILL);
  command.expect_nothing_left();
}

TEST(RunCleanupTest, kill_9_of_the_launcher_with_grandchildren) {
  Command command(start_of({"-n", "4"}, kFamily));
  command.read_until("pid", 4);
  command.wait_for_processes(4 * 4 + 2);  // the launcher and its guard too
  command.send(SIGKILL);
  EXPECT_EQ(command.wait().signal, SIGKILL);
  command.expect_nothing_left();
}

TEST(RunCleanupTest, kill_9_of_the_guard_and_then_of_the_launcher) {
  Command command(start_of({"-n", "4"}, "trap '' TERM INT HUP; echo ready; exec sleep 1000"));
  command.read_until("ready", 4);
  for (const pid_t pid : command.processes()) {
    if (contents_of(fmt::format("/proc/{}/comm", pid)) == "lockstep-guard\n") kill(pid, SIGKILL);
  }
  command.wait_for_processes(4 + 1);
  command.send(SIGKILL);
  command.wait();
  command.expect_nothing_left();
}

TEST(RunCleanupTest, kill_9_of_the_launchers_whole_process_group) {
  StartOptions start = start_of({"-n", "2"}, kFamily);
  start.shell = "exec setsid \"$@\"";  // leads its group, as under an interactive shell
  Command command(start);
  command.read_until("pid", 2);
  kill(-command.pid(), SIGKILL);
  EXPECT_EQ(command.wait().signal, SIGKILL);
  command.expect_nothing_left();
}

TEST(RunCleanupTest, kill_9_of_the_launcher_after_a_restart) {
  Command command(start_of({"-n", "2", "--max-restarts", "1", "--grace", "0.2"},
                           "[ $LOCKSTEP_RESTART = 0 ] && exit 1; " + std::string(kFamily)));
  command.read_until("pid", 2);
  command.send(SIGKILL);
  command.wait();
  command.expect_nothing_left();
}

TEST(RunCleanupTest, kill_9_of_the_launcher_while_it_starts) {
  for (const std::size_t n_processes : {1, 2, 3, 10, 40, 100, 200}) {
    Command command(start_of({"-n", "100"}, kFamily));
    EXPECT_TRUE(wait_until([&] { return command.processes().size() >= n_processes; }));
    command.send(SIGKILL);
    command.wait_unread();
    command.expect_nothing_left();
  }
}

TEST(RunCleanupTest, without_close_range_the_guard_ends_and_guards) {
#ifdef SYS_close_range
  if (!can_miss_calls()) GTEST_SKIP() << "no seccomp here";
  for (const bool is_killed : {false, true}) {
    StartOptions start = start_of({"-n", "2"}, is_killed ? kFamily : "exit 0");
    start.missing_call = SYS_close_range;
    Command command(start);
    if (is_killed) {
      command.read_until("pid", 2);
      command.send(SIGKILL);
    }
    const Ended ended = command.wait();
    EXPECT_EQ(is_killed ? ended.signal : ended.exit_code, is_killed ? SIGKILL : 0) << ended.err;
    command.expect_nothing_left();
  }
#else
  GTEST_SKIP() << "these headers do not know close_range";
#endif
}

/// Where the launcher runs out of something. In a session of its own, so that a signal to its
/// process group ends its shell too, but nobody else.
Ended run_short_of(const std::string& limits, const std::string& user, int n_ranks) {
  Command command(StartOptions{
      .arguments = {"run", "-n", std::to_string(n_ranks), "sleep", "1000"},
      .shell = fmt::format(
          R"(exec setsid {} bash -c '{}; "$@"; echo "the shell goes on after $?"' sh "$@")", user,
          limits),
      .watchdog = std::chrono::seconds(30)});
  const Ended ended = command.wait();
  command.expect_nothing_left();
  EXPECT_EQ(ended.out, "the shell goes on after 1\n") << ended.err;
  EXPECT_EQ(lines_of(ended.err).size(), 1U) << ended.err;
  return ended;
}

TEST(RunCleanupTest, without_descriptors_for_a_rank_the_others_end_and_nobody_else) {
  if (kSanitizerNeedsDescriptors) {
    GTEST_SKIP() << "UndefinedBehaviorSanitizer needs a descriptor";
  }
  // 104 is what 8 ranks need, but the caller uses most of them.
  const Ended ended =
      run_short_of(R"(for i in {10..89}; do eval "exec $i</dev/null"; done; ulimit -n 104)", "", 8);
  const std::regex line(
      R"(lockstep run: cannot start rank [0-7] of 8 \(no descriptor is left: raise the limit on )"
      R"(open files, ulimit -n, or start fewer ranks\): .*\n)");
  EXPECT_TRUE(std::regex_match(ended.err, line)) << ended.err;
}

TEST(RunCleanupTest, without_processes_for_a_rank_the_others_end_and_nobody_else) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to run as a user without processes";
  const std::string as_user = "setpriv --reuid 54321 --regid 54321 --clear-groups ";
  if (std::system((as_user + "test -x " LOCKSTEP_COMMAND).c_str()) != 0) {
    GTEST_SKIP() << "another user cannot run " LOCKSTEP_COMMAND;
  }
  for (const int n_processes : {2, 5}) {  // the shell and the launcher are two
    // LeakSanitizer, if it is there, would start a process.
    const Ended ended = run_short_of(
        fmt::format("export ASAN_OPTIONS=detect_leaks=0; ulimit -u {}", n_processes), as_user, 8);
    const std::regex line(
        R"(lockstep run: cannot start (the guard process|rank [0-7] of 8) \(the limit on )"
        R"(processes of this user or container is reached: raise ulimit -u or the pids.max .*\n)");
    EXPECT_TRUE(std::regex_match(ended.err, line)) << ended.err;
  }
}

TEST(RunCleanupTest, what_a_rank_leaves_behind_ends_with_it) {
  const Ended ended = run(script({"-n", "2"}, "sleep 1000 > /dev/null 2>&1 & exit 0"));
  EXPECT_EQ(ended.exit_code, 0);
}

TEST(RunCleanupTest, what_a_rank_leaves_behind_may_finish_writing) {
  const Ended ended =
      run(script({"-n", "2"},
                 "(until grep -q ') Z ' /proc/$$/stat; do sleep 0.01; done; echo late) & exit 0"));
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.out, "late\nlate\n");
}

TEST(RunCleanupTest, what_a_rank_leaves_behind_has_only_the_grace) {
  const Ended ended = run(script({"-n", "2", "--grace", "0.2"}, "sleep 1000 & exit 0"));
  EXPECT_EQ(ended.exit_code, 0);
}

TEST(RunCleanupTest, does_not_wait_for_who_left_the_group_with_an_output) {
  // A daemon that made its own session is out of reach, and must not hold the launcher up.
  const TemporaryFolder folder;
  const std::string left = folder / "left";
  Command command(start_of(
      {"-n", "1", "--grace", "0.2"},
      "setsid sh -c 'touch " + left + "; exec sleep 1000' & " + await_file(left) + "exit 0"));
  EXPECT_EQ(command.wait().exit_code, 0);
}

}  // namespace
}  // namespace lockstep::test
