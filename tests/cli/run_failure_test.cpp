#include <fmt/format.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

using Lines = std::vector<std::string>;

std::vector<std::string> with_run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "run");
  return arguments;
}

// A shell ignores SIGTERM also for what it starts.
constexpr const char* kStubborn = "trap '' TERM INT; echo ready; sleep 1000";

TEST(RunFailureTest, ends_with_the_code_of_the_rank_that_failed) {
  const Ended ended = run(script({"-n", "3"}, "[ $RANK = 1 ] && exit 7; sleep 1000"));
  EXPECT_EQ(ended.exit_code, 7);
  const std::regex line(
      R"(lockstep: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d rank 1 \(pid \d+\) exited with code 7 after )"
      R"(\d+\.\d\d s; ending the others\n)");
  EXPECT_TRUE(std::regex_match(ended.err, line)) << ended.err;
}

TEST(RunFailureTest, names_the_signal) {
  const Ended ended = run(script({"-n", "1"}, "kill -SEGV $$"));
  EXPECT_EQ(ended.exit_code, 128 + SIGSEGV);
  EXPECT_TRUE(contains(ended.err, "rank 0 (pid ")) << ended.err;
  EXPECT_TRUE(contains(ended.err, "was killed by SIGSEGV (signal 11, Segmentation fault"))
      << ended.err;
}

TEST(RunFailureTest, names_the_first_of_two) {
  const TemporaryFolder folder;
  const std::string pid = folder / "pid";
  const Ended ended = run(script({"-n", "4"}, "[ $RANK = 2 ] && { " + write_pid(pid) +
                                                  "exit 5; }; [ $RANK = 1 ] && { " +
                                                  await_end_of(pid) + "exit 6; }; exit 0"));
  EXPECT_EQ(ended.exit_code, 5);
  EXPECT_TRUE(contains(ended.err, "rank 2 (pid ")) << ended.err;
  EXPECT_FALSE(contains(ended.err, "rank 1 (pid ")) << ended.err;
}

TEST(RunFailureTest, one_after_the_other_the_first_is_named_however_late_we_look) {
  // While the launcher is stopped both fail, the higher rank first.
  const TemporaryFolder folder;
  Command command(StartOptions{
      .arguments =
          with_run(script({"-n", "2"}, "echo \"ready $RANK $$.\"; read x < " + (folder / "$RANK") +
                                           "; [ $RANK = 1 ] && exit 5; exit 6")),
      .shell = "mkfifo " + (folder / "0 ") + (folder / "1") + "; exec \"$@\""});
  command.read_until("ready", 2);
  command.send(SIGSTOP);
  for (const char* rank : {"1", "0"}) {  // rank 0 is let go when rank 1 has ended
    std::smatch match;
    const std::regex of_rank(fmt::format(R"(ready {} (\d+)\.)", rank));
    ASSERT_TRUE(std::regex_search(command.out(), match, of_rank));
    const pid_t pid = std::stoi(match[1].str());
    ASSERT_EQ(std::system(("echo > " + (folder / rank)).c_str()), 0);
    EXPECT_TRUE(wait_until([pid] { return thread_state(pid) == 'Z'; }));
  }
  command.send(SIGCONT);
  const Ended ended = command.wait();
  EXPECT_EQ(ended.exit_code, 5) << ended.err;
  EXPECT_TRUE(contains(ended.err, "rank 1 (pid ")) << ended.err;
}

TEST(RunFailureTest, last_words_stand_before_the_report) {
  const TemporaryFolder folder;
  const std::string go = folder / "go";
  Command command(
      StartOptions{.arguments = with_run(script({"-n", "1"}, "echo \"pid $$.\"; " + await_file(go) +
                                                                 "echo reason >&2; exit 3"))});
  command.read_until(".");
  command.send(SIGSTOP);  // so that it finds the words and the end together
  std::ofstream(go).flush();
  const pid_t rank = std::stoi(command.out().substr(4));
  EXPECT_TRUE(wait_until([&] { return thread_state(rank) == 'Z'; }));
  command.send(SIGCONT);
  const Ended ended = command.wait();
  ASSERT_EQ(lines_of(ended.err).size(), 2U) << ended.err;
  EXPECT_EQ(lines_of(ended.err)[0], "reason");
}

TEST(RunFailureTest, others_have_time_for_their_own_error_before_sigterm) {
  const TemporaryFolder folder;
  const std::string pid = folder / "pid";
  const Ended ended = run(script(
      {"-n", "2"}, "trap 'echo got TERM; exit 0' TERM; [ $RANK = 1 ] && { " + write_pid(pid) +
                       "exit 3; }; " + await_end_of(pid) + "echo own words; sleep 1000 & wait"));
  EXPECT_EQ(ended.exit_code, 3);
  EXPECT_EQ(lines_of(ended.out), (Lines{"own words", "got TERM"}));
}

TEST(RunFailureTest, kills_who_ignores_sigterm_after_the_grace) {
  const Ended ended = run(
      script({"-n", "3", "--grace", "0.2"}, "[ $RANK = 1 ] && exit 3; " + std::string(kStubborn)));
  EXPECT_EQ(ended.exit_code, 3);
  EXPECT_TRUE(contains(ended.err, "ranks 0 and 2 did not end within 0.2 s: killing (SIGKILL)"))
      << ended.err;
}

TEST(RunFailureTest, ends_a_stopped_rank) {
  const Ended ended =
      run(script({"-n", "2", "--grace", "1000"}, "[ $RANK = 1 ] && exit 3; kill -STOP $$"));
  EXPECT_EQ(ended.exit_code, 3);
}

TEST(RunFailureTest, ranks_may_end_at_different_times) {
  const TemporaryFolder folder;
  const Ended ended = run(script(
      {"-n", "3"}, write_pid(folder / "$RANK") + "before=$((RANK - 1)); [ $RANK = 0 ] || { " +
                       await_end_of(folder / "$before") + "}; echo $RANK"));
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(sorted_lines_of(ended.out), (Lines{"0", "1", "2"}));
}

TEST(RunFailureTest, a_rank_has_the_signals_that_the_launcher_ignores) {
  const TemporaryFolder folder;
  EXPECT_EQ(
      run(script({"-n", "1"}, "ulimit -f 1; exec head -c 10000 /dev/zero > " + (folder / "f")))
          .exit_code,
      128 + SIGXFSZ);
}

TEST(RunFailureTest, a_head_of_the_segment_that_a_rank_overwrote) {
  const TemporaryFolder folder;
  // The number of ranks, at byte 12.
  Command command(StartOptions{
      .arguments =
          with_run(script({"-n", "2"},
                          "[ $RANK = 1 ] || exec sleep 1000; printf '\\377\\377\\377\\177' | "
                          "dd of=/proc/self/fd/${LOCKSTEP_SEGMENT%%:*} bs=1 seek=12 "
                          "conv=notrunc 2> /dev/null; exit 3")),
      .variables = {{"LOCKSTEP_RECORD_DIR", folder.path()}}});
  EXPECT_EQ(command.wait().exit_code, 3) << command.err();
  EXPECT_TRUE(contains(command.err(), "flight records are in")) << command.err();
}

// --- signals --------------------------------------------------------------------------------

class RunSignalTest : public testing::TestWithParam<int> {};

TEST_P(RunSignalTest, reaches_every_rank) {
  Command command(StartOptions{
      .arguments =
          with_run(script({"-n", "3", "--grace", "3"},
                          "trap 'echo got INT; exit 9' INT; trap 'echo got TERM; exit 9' TERM; "
                          "trap 'echo got HUP; exit 9' HUP; echo ready; sleep 1000 & wait"))});
  command.read_until("ready", 3);
  command.send(GetParam());
  const Ended ended = command.wait();
  const std::string name = sigabbrev_np(GetParam());
  Lines expected(3, "got " + name);
  expected.insert(expected.end(), 3, "ready");
  EXPECT_EQ(sorted_lines_of(ended.out), expected);
  EXPECT_EQ(ended.exit_code, 9);
  EXPECT_TRUE(contains(ended.err, "SIG" + name + ": forwarded to the ranks")) << ended.err;
  command.expect_nothing_left();
}

TEST_P(RunSignalTest, exit_code_tells_the_signal) {
  Command command(StartOptions{.arguments = with_run(script({"-n", "2", "--max-restarts", "3"},
                                                            "echo ready; exec sleep 1000"))});
  command.read_until("ready", 2);
  command.send(GetParam());
  EXPECT_EQ(command.wait().exit_code, 128 + GetParam());
  EXPECT_FALSE(contains(command.err(), "restart")) << command.err();
  command.expect_nothing_left();
}

INSTANTIATE_TEST_SUITE_P(All, RunSignalTest, testing::Values(SIGINT, SIGTERM, SIGHUP),
                         [](const auto& test) { return std::string(sigabbrev_np(test.param)); });

// What a rank started must outlive the rank's own handler, which may need it: a DataLoader's
// workers.
TEST_P(RunSignalTest, reaches_what_a_joined_rank_started_when_the_rank_has_ended) {
  const std::string name = std::string("SIG") + sigabbrev_np(GetParam());
  Command command(StartOptions{.arguments = {"run", "-n", "2", SIGNALS_PROGRAM}});
  command.read_until("ready", 2);
  command.send(GetParam());
  const Ended ended = command.wait();
  Lines expected(2, "helper got " + name);
  expected.insert(expected.end(), 2, "rank got " + name + " alone");
  expected.insert(expected.end(), 2, "ready");
  EXPECT_EQ(sorted_lines_of(ended.out), expected) << ended.err;
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  command.expect_nothing_left();
}

TEST_P(RunSignalTest, reaches_the_parent_of_a_joined_rank_when_the_rank_has_ended) {
  const std::string name = sigabbrev_np(GetParam());
  Command command(StartOptions{
      .arguments =
          with_run(script({"-n", "1"}, "trap 'echo shell got " + name + "; exit 0' " + name + "; " +
                                           SIGNALS_PROGRAM + "; echo \"rank ended with $?\"; " +
                                           "while :; do sleep 0.01; done"))});
  command.read_until("ready");
  command.send(GetParam());
  const Ended ended = command.wait();
  EXPECT_TRUE(contains(ended.out, "rank got SIG" + name + " alone")) << ended.out;
  EXPECT_TRUE(contains(ended.out, "helper got SIG" + name)) << ended.out;
  EXPECT_TRUE(contains(ended.out, "shell got " + name)) << ended.out;
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  command.expect_nothing_left();
}

// Slurm's warning before it ends a job: sbatch --signal=USR1@60.
class RunWarningTest : public testing::TestWithParam<int> {};

TEST_P(RunWarningTest, reaches_ranks_that_have_not_joined_and_ends_nothing) {
  const TemporaryFolder folder;
  const std::string name = sigabbrev_np(GetParam());
  Command command(StartOptions{
      .arguments = with_run(script({"-n", "2", "--grace", "0"},
                                   "trap 'echo got " + name + "' " + name + "; echo ready; " +
                                       await_file(folder / "go") + "echo over"))});
  command.read_until("ready", 2);
  command.send(GetParam());
  command.read_until("got " + name, 2);
  std::ofstream(folder / "go").flush();
  const Ended ended = command.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(contains(ended.out, "over")) << ended.out;
  EXPECT_TRUE(contains(ended.err, "SIG" + name + ": forwarded to the ranks\n")) << ended.err;
}

TEST_P(RunWarningTest, reaches_a_joined_rank_alone) {
  const std::string name = std::string("SIG") + sigabbrev_np(GetParam());
  Command command(
      StartOptions{.arguments = {"run", "-n", "2", "--grace", "1000", SIGNALS_PROGRAM}});
  command.read_until("ready", 2);
  command.send(GetParam());
  command.read_until("rank got " + name + " alone", 2);
  command.send(SIGTERM);
  const Ended ended = command.wait();
  Lines expected(2, "helper got SIGTERM");
  expected.insert(expected.end(), 2, "rank got SIGTERM alone");
  expected.insert(expected.end(), 2, "rank got " + name + " alone");
  expected.insert(expected.end(), 2, "ready");
  EXPECT_EQ(sorted_lines_of(ended.out), expected) << ended.err;
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
}

INSTANTIATE_TEST_SUITE_P(All, RunWarningTest, testing::Values(SIGUSR1, SIGUSR2),
                         [](const auto& test) { return std::string(sigabbrev_np(test.param)); });

TEST(RunInterruptTest, ranks_that_end_well_make_it_a_success) {
  Command command(StartOptions{
      .arguments =
          with_run(script({"-n", "2"}, "trap 'exit 0' TERM; echo ready; sleep 1000 & wait"))});
  command.read_until("ready", 2);
  command.send(SIGTERM);
  EXPECT_EQ(command.wait().exit_code, 0);
}

TEST(RunInterruptTest, second_sigint_kills) {
  Command command(
      StartOptions{.arguments = with_run(script({"-n", "2", "--grace", "1000"}, kStubborn))});
  command.read_until("ready", 2);
  command.send(SIGINT);
  command.read_until("a second one kills");
  EXPECT_GE(command.processes().size(), 3U);
  command.send(SIGINT);
  EXPECT_EQ(command.wait().exit_code, 128 + SIGKILL);
  command.expect_nothing_left();
}

TEST(RunInterruptTest, sigterm_is_followed_by_sigkill_after_the_grace) {
  Command command(
      StartOptions{.arguments = with_run(script({"-n", "2", "--grace", "0.2"}, kStubborn))});
  command.read_until("ready", 2);
  command.send(SIGTERM);
  EXPECT_EQ(command.wait().exit_code, 128 + SIGKILL);
  EXPECT_TRUE(contains(command.err(), "did not end within 0.2 s")) << command.err();
}

TEST(RunInterruptTest, second_sigint_does_not_wait_for_a_reader_who_takes_nothing) {
  Command command(StartOptions{.arguments = {"run", "-n", "2", "/bin/sh", "-c",
                                             "trap '' INT; echo ready >&2; seq 1 10000000"}});
  command.read_until("ready", 2);
  command.send(SIGINT);
  command.read_until("a second one kills");
  command.send(SIGINT);
  command.wait_unread();
  command.expect_nothing_left();
}

TEST(RunInterruptTest, ignored_hangup_stays_ignored) {  // nohup
  const TemporaryFolder folder;
  Command command(StartOptions{
      .arguments =
          with_run(script({"-n", "1"}, "echo ready; " + await_file(folder / "go") + "echo over")),
      .shell = "trap '' HUP; exec \"$@\""});
  command.read_until("ready");
  command.send(SIGHUP);
  std::ofstream(folder / "go").flush();
  const Ended ended = command.wait();
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.out, "ready\nover\n");
  EXPECT_EQ(ended.err, "");
}

// --- restarts -------------------------------------------------------------------------------

TEST(RunRestartTest, starts_the_whole_world_again) {
  const Ended ended = run(script({"-n", "3", "--max-restarts", "5"},
                                 "echo $LOCKSTEP_RESTART $RANK; "
                                 "[ $LOCKSTEP_RESTART -lt 2 ] && [ $RANK = 1 ] && exit 4; "
                                 "[ $LOCKSTEP_RESTART -lt 1 ] && sleep 1000; exit 0"));
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(sorted_lines_of(ended.out),
            (Lines{"0 0", "0 1", "0 2", "1 0", "1 1", "1 2", "2 0", "2 1", "2 2"}));
  EXPECT_TRUE(contains(ended.err, "restart 1 of 5: starting all 3 ranks again")) << ended.err;
  EXPECT_TRUE(contains(ended.err, "restart 2 of 5")) << ended.err;
  EXPECT_FALSE(contains(ended.err, "restart 3 of 5")) << ended.err;
}

TEST(RunRestartTest, gives_up) {
  const Ended ended = run(script({"-n", "2", "--max-restarts", "2"}, "echo x; exit 4"));
  EXPECT_EQ(ended.exit_code, 4);
  EXPECT_EQ(lines_of(ended.out), Lines(6, "x"));
}

TEST(RunRestartTest, each_world_has_its_own_segment) {
  const TemporaryFolder folder;
  const std::string said = folder / "$LOCKSTEP_RESTART.";
  const Ended ended = run(script({"-n", "2", "--max-restarts", "1"},
                                 "IFS=:; set -- $LOCKSTEP_SEGMENT; echo $2; touch " + said +
                                     "$RANK; " + await_file(said + "$((1 - RANK))") + "exit 1"));
  const Lines lines = lines_of(ended.out);
  ASSERT_EQ(lines.size(), 4U);
  EXPECT_EQ(lines[0], lines[1]);
  EXPECT_EQ(lines[2], lines[3]);
  EXPECT_NE(lines[0], lines[2]);
}

}  // namespace
}  // namespace lockstep::test
