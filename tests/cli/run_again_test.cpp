#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/temporary_folder.hpp"

// init_dist after destroy_dist, under `lockstep run`.
namespace lockstep::test {
namespace {

std::vector<std::string> again(int n_ranks, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"-n", std::to_string(n_ranks), AGAIN_PROGRAM});
  return arguments;
}

std::vector<std::string> sums(int n_ranks, int n_rounds) {
  std::vector<std::string> lines;
  for (int round = 0; round < n_rounds; ++round) {
    for (int rank = 0; rank < n_ranks; ++rank) {
      lines.push_back(
          fmt::format("round {}: rank {} sum {} shared", round, rank, n_ranks * (n_ranks + 1) / 2));
    }
  }
  std::sort(lines.begin(), lines.end());
  return lines;
}

std::vector<std::string> lines_with(const std::string& text, const std::string& part) {
  std::vector<std::string> lines = lines_of(text);
  std::erase_if(lines, [&](const std::string& line) { return !contains(line, part); });
  return lines;
}

TEST(RunAgainTest, ranks_join_one_world_after_another) {
  for (const int n_ranks : {1, 2, 4}) {
    const int n_rounds = n_ranks == 2 ? 40 : 3;
    const Ended ended = run(again(n_ranks, {"rounds", std::to_string(n_rounds)}));
    EXPECT_EQ(ended.exit_code, 0) << ended.err;
    EXPECT_EQ(sorted_lines_of(ended.out), sums(n_ranks, n_rounds)) << ended.err;
  }
}

TEST(RunAgainTest, more_worlds_than_the_launcher_may_open_files) {
  const Ended ended = run(
      StartOptions{.arguments = again(2, {"rounds", "100"}), .shell = "ulimit -n 80; exec \"$@\""});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(sorted_lines_of(ended.out), sums(2, 100)) << ended.err;
}

TEST(RunAgainTest, a_rank_that_ended_instead_is_named) {
  const Ended ended = run(again(3, {"exit", "1"}));
  EXPECT_EQ(lines_with(ended.out, "rank 1 exited with code 0").size(), 2U) << ended.out;
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
}

TEST(RunAgainTest, a_rank_that_does_not_ask_is_named) {
  const TemporaryFolder folder;
  const Ended ended = run(again(2, {"stay", "1", folder / "said"}));
  EXPECT_EQ(lines_with(ended.out, "waited 0.5 s for rank 1").size(), 1U) << ended.out;
  EXPECT_TRUE(contains(ended.out, "has not joined the world yet (init_dist)")) << ended.out;
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
}

TEST(RunAgainTest, retry_after_timeout) {
  const TemporaryFolder folder;
  const Ended ended = run(again(2, {"late", folder / "go"}));
  EXPECT_EQ(ended.exit_code, 0) << ended.err << ended.out;
  EXPECT_EQ(lines_with(ended.out, "waited 0.3 s for rank 1").size(), 1U) << ended.out;
  EXPECT_EQ(lines_with(ended.out, "round 1").size(), 2U) << ended.out;
}

TEST(RunAgainTest, a_rank_killed_in_a_later_world_is_named) {
  const Ended ended = run(again(3, {"kill", "2"}));
  EXPECT_EQ(ended.exit_code, 128 + SIGKILL);
  EXPECT_EQ(lines_with(ended.out, "rank 2 was killed by signal 9").size(), 2U) << ended.out;
  EXPECT_TRUE(contains(ended.err, "rank 2 (pid ")) << ended.err;
}

TEST(RunAgainTest, a_fork_of_a_rank_is_not_the_rank) {
  const Ended ended = run(again(2, {"fork"}));
  EXPECT_EQ(ended.exit_code, 0) << ended.err << ended.out;
  EXPECT_EQ(lines_with(ended.out, "rank 0 is taken by process").size(), 1U) << ended.out;
  EXPECT_EQ(lines_with(ended.out, "round 1").size(), 2U) << ended.out;
}

TEST(RunAgainTest, a_second_process_is_not_the_rank) {
  const std::string line = fmt::format("{0} rounds 2 && ! {0} rounds 1", AGAIN_PROGRAM);
  const Ended ended = run(script({"-n", "2"}, line));
  EXPECT_EQ(ended.exit_code, 0) << ended.err << ended.out;
  for (const char* text : {"rank 0 is taken by process", "rank 1 is taken by process"}) {
    EXPECT_EQ(lines_with(ended.out, text).size(), 1U) << ended.out;
  }
}

TEST(RunAgainTest, a_group_of_an_earlier_world_does_not_meet_the_later_one) {
  const Ended ended = run(again(2, {"group"}));
  EXPECT_EQ(ended.exit_code, 0) << ended.err << ended.out;
  EXPECT_EQ(lines_with(ended.out, "round 1").size(), 2U) << ended.out;
  EXPECT_EQ(lines_with(ended.out, "rank 1 left the world").size(), 1U) << ended.out;
}

TEST(RunAgainTest, a_restart_begins_with_the_inherited_world) {
  const std::string line = fmt::format("{} rounds 2; [ $LOCKSTEP_RESTART = 1 ]", AGAIN_PROGRAM);
  const Ended ended = run(script({"-n", "2", "--max-restarts", "1"}, line));
  EXPECT_EQ(ended.exit_code, 0) << ended.err << ended.out;
}

}  // namespace
}  // namespace lockstep::test
