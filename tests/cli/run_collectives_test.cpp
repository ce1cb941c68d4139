#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <regex>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/expect.hpp"

namespace lockstep::test {
namespace {

class RunCollectivesTest : public testing::TestWithParam<int> {};

TEST_P(RunCollectivesTest, ranks_connect) {
  const int n_ranks = GetParam();
  const Ended ended = run({"-n", std::to_string(n_ranks), COLLECTIVES_PROGRAM, "sum"});
  EXPECT_EQ(ended.exit_code, 0) << ended.err << ended.out;
  std::vector<std::string> expected;
  for (int rank = 0; rank < n_ranks; ++rank) {
    expected.push_back(fmt::format("rank {} of {}: sum {}, backend shared", rank, n_ranks,
                                   n_ranks * (n_ranks + 1) / 2));
  }
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(sorted_lines_of(ended.out), expected);
}

INSTANTIATE_TEST_SUITE_P(Worlds, RunCollectivesTest, testing::Values(1, 2, 4, 16));

TEST(RunLossTest, every_peer_of_a_killed_rank_learns_who_and_by_what) {
  Command command(StartOptions{.arguments = {"run", "-n", "4", COLLECTIVES_PROGRAM, "lose", "2"}});
  command.read_until("joined", 4);
  const std::regex of_rank_2(R"(rank 2 is pid (\d+)\.)");
  std::smatch match;
  ASSERT_TRUE(std::regex_search(command.out(), match, of_rank_2)) << command.out();
  const std::string pid = match[1].str();  // the match points into text that is about to grow
  kill(std::stoi(pid), SIGKILL);
  const Ended ended = command.wait();
  EXPECT_EQ(ended.exit_code, 137);
  expect_contains(ended.err, "rank 2 (pid " + pid + ") was killed by SIGKILL");
  int n_told = 0;
  for (const std::string& line : lines_of(ended.out)) {
    if (line.starts_with("joined")) continue;
    ++n_told;
    EXPECT_TRUE(line.starts_with("PeerLost: all_reduce")) << line;
    expect_contains(line, "rank 2");
    expect_contains(line, "SIGKILL");
  }
  EXPECT_EQ(n_told, 3) << ended.out;
  command.expect_nothing_left();
}

/// What the peers of rank 1 print when it does something else than to come.
std::string told_when_rank_1(const std::string& does) {
  // One that stands still is killed soon; else all end by themselves, however slow the machine.
  const bool is_still = does == "stop" || does == "loop";
  Command command(StartOptions{.arguments = {"run", "-n", "3", "--grace", is_still ? "0.1" : "20",
                                             COLLECTIVES_PROGRAM, does, "1"}});
  const Ended ended = command.wait();
  EXPECT_NE(ended.exit_code, 0);
  command.expect_nothing_left();
  return ended.out;
}

void expect_match(const std::string& text, const std::string& pattern) {
  EXPECT_TRUE(std::regex_search(text, std::regex(pattern))) << text << "\n  lacks: " << pattern;
}

TEST(RunLateTest, a_stopped_rank) {
  expect_match(told_when_rank_1("stop"),
               R"(rank 1 is stopped by a signal or a debugger \(pid (\d+); kill -CONT \1\))");
}

TEST(RunLateTest, a_rank_in_an_endless_loop) {
  expect_match(told_when_rank_1("loop"),
               R"(rank 1 is running \(pid \d+\); .* outside lockstep for \d+\.\d s )"
               R"(\(last call: all_reduce #1 on group 'world' at collectives\.cpp:\d+\))");
}

TEST(RunLateTest, a_rank_that_left_early) {
  expect_match(told_when_rank_1("exit"),
               R"(PeerLost: barrier .*rank 1 left the world \(destroy_dist or program exit\))");
}

TEST(RunLateTest, an_uncaught_exception) {
  expect_match(told_when_rank_1("throw"),
               R"(PeerFailed: barrier .*rank 1 failed: the disk is full)");
}

TEST(RunLateTest, the_launcher_names_who_left_and_not_who_waited) {
  Command command(StartOptions{
      .arguments = {"run", "-n", "3", "--grace", "20", COLLECTIVES_PROGRAM, "exit", "1"}});
  EXPECT_EQ(command.wait().exit_code, 1);
  expect_match(command.err(),
               R"(^lockstep: \S+ \S+ rank 1 \(pid \d+\) (left the world|exited with code 0 after )"
               R"(\d+\.\d\d s) while rank [02] still waited for it; rank [02] \(pid \d+\) exited )"
               R"(with code 1 after)");
}

TEST(RunLateTest, the_launcher_does_not_blame_who_left_after_calls_that_differ) {
  Command command(StartOptions{
      .arguments = {"run", "-n", "3", "--grace", "20", COLLECTIVES_PROGRAM, "size", "1"}});
  EXPECT_EQ(command.wait().exit_code, 2);
  expect_match(command.err(), R"(^lockstep: \S+ \S+ rank 0 \(pid \d+\) exited with code 2 after)");
}

TEST(RunAloneTest, ranks_that_never_joined_are_reported) {
  const std::string note = "no rank called lockstep::init_dist: each of the 2 ran alone";
  const Ended ended = run({"-n", "2", COLLECTIVES_PROGRAM, "alone"});
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_TRUE(contains(ended.err, note)) << ended.err;
  EXPECT_EQ(run({"-n", "1", COLLECTIVES_PROGRAM, "alone"}).err, "");
  EXPECT_EQ(run({"-n", "2", COLLECTIVES_PROGRAM, "sum"}).err, "");
  EXPECT_EQ(run({"-n", "2", "echo", "hi"}).err, "");
  EXPECT_EQ(run({"-n", "2", LOCKSTEP_COMMAND, "--version"}).err, "");
}

}  // namespace
}  // namespace lockstep::test
