#include <fmt/format.h>
#include <gtest/gtest.h>

#include <csignal>
#include <string>
#include <vector>

#include "cli/command.hpp"
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
