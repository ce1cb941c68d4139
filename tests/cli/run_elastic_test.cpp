#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/temporary_folder.hpp"

// `lockstep run --elastic`, and regroup() in its ranks.
namespace lockstep::test {
namespace {

Ended run_elastic(int n_ranks, const std::string& limits, std::vector<std::string> arguments) {
  std::vector<std::string> all{"-n", std::to_string(n_ranks)};
  if (!limits.empty()) all.insert(all.end(), {"--elastic", limits});
  all.emplace_back(ELASTIC_PROGRAM);
  all.insert(all.end(), arguments.begin(), arguments.end());
  return run(all);
}

long n_lines_with(const std::string& text, const std::string& part) {
  const auto lines = lines_of(text);
  return std::ranges::count_if(lines, [&](auto& line) { return contains(line, part); });
}

TEST(RunElasticTest, the_others_go_on_and_the_lost_rank_is_replaced) {
  const Ended ended = run_elastic(4, "2", {"steps", "kill", "1"});
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  for (const int rank : {0, 1, 2}) {
    const std::string line = fmt::format(
        "generation 1: rank {} of 3, lost: 0.1 was killed by signal 9 (SIGKILL); joined: ", rank);
    EXPECT_EQ(n_lines_with(ended.out, line), 1) << line << "\n" << ended.out;
  }
  // The replacement says nothing: it has not regrouped.
  EXPECT_EQ(n_lines_with(ended.out, "of 4, lost: joined: 3"), 3) << ended.out;
  EXPECT_EQ(n_lines_with(ended.out, "of 4 is done"), 4) << ended.out;
  EXPECT_TRUE(contains(ended.err, "rank 1 (pid ")) << ended.err;
  EXPECT_TRUE(contains(ended.err, "generation 1: 3 ranks")) << ended.err;
  EXPECT_TRUE(contains(ended.err, "generation 2: 4 ranks")) << ended.err;
}

TEST(RunElasticTest, however_ranks_are_lost) {
  for (const std::string how : {"kill", "exit", "throw", "stop"}) {
    const Ended ended = run_elastic(4, "2:4", {"steps", how, "0,3"});
    EXPECT_EQ(ended.exit_code, 0) << how << ended.out << ended.err;
    EXPECT_EQ(n_lines_with(ended.out, "of 4 is done"), 4) << how << ended.out << ended.err;
  }
}

TEST(RunElasticTest, one_rank_goes_on_alone) {
  const Ended ended = run_elastic(3, "1:3", {"steps", "kill", "0,1"});
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_EQ(n_lines_with(ended.out, "of 3 is done"), 3) << ended.out << ended.err;
}

TEST(RunElasticTest, too_few_ranks_wait_for_replacements) {
  const Ended ended = run_elastic(3, "3", {"steps", "kill", "1"});
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_EQ(n_lines_with(ended.out, "generation 1: rank 0 of 3"), 1) << ended.out;
  EXPECT_EQ(n_lines_with(ended.out, "of 3 is done"), 3) << ended.out << ended.err;
}

TEST(RunElasticTest, without_survivors_the_job_ends_as_the_first_lost_rank) {
  const Ended ended = run_elastic(2, "1", {"steps", "kill", "0,1"});
  EXPECT_EQ(ended.exit_code, 128 + SIGKILL) << ended.out << ended.err;
  EXPECT_TRUE(contains(ended.err, "no rank is left to go on from; ending the job")) << ended.err;
  EXPECT_TRUE(contains(ended.err, "no rank had gone on by regroup() or run_elastic()"))
      << ended.err;
}

TEST(RunElasticTest, a_rank_that_finished_is_not_replaced) {
  const Ended ended = run_elastic(3, "1", {"steps", "finish", "2"});
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_EQ(n_lines_with(ended.out, "of 2 is done"), 2) << ended.out << ended.err;
}

TEST(RunElasticTest, ranks_regroup_without_a_loss) {
  const Ended ended = run_elastic(3, "1", {"boundary"});
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_EQ(n_lines_with(ended.out, "of 3, lost: joined: "), 60) << ended.out;
}

TEST(RunElasticTest, groups_of_an_earlier_generation_are_dead) {
  const Ended ended = run_elastic(2, "1", {"group"});
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_EQ(
      n_lines_with(ended.out, "generation 0 of the world is over: a rank asked for the next one"),
      4)
      << ended.out;
}

TEST(RunElasticTest, a_fork_of_a_rank_is_refused) {
  const Ended ended = run_elastic(3, "2:2", {"fork"});
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_TRUE(contains(ended.out, "this process is a fork of rank 0 (pid ")) << ended.out;
  EXPECT_EQ(n_lines_with(ended.out, "generation 1: rank "), 2) << ended.out;
}

TEST(RunElasticTest, who_has_regrouped_is_not_told_how) {
  const Ended ended = run_elastic(3, "3", {"refused"});
  EXPECT_TRUE(contains(ended.err, "ending the job")) << ended.err;
  EXPECT_FALSE(contains(ended.err, "no rank had gone on")) << ended.err;
}

TEST(RunElasticTest, after_a_refusal_a_rank_is_not_alone_silently) {
  const Ended ended = run_elastic(3, "3", {"refused"});
  EXPECT_EQ(ended.exit_code, 1) << ended.out << ended.err;
  EXPECT_EQ(n_lines_with(ended.out, "`lockstep run` ends the job: 2 of at least 3 ranks are left"),
            2)
      << ended.out;
  EXPECT_EQ(n_lines_with(ended.out, "an earlier regroup() failed: this process is in no world"), 2)
      << ended.out;
  EXPECT_EQ(n_lines_with(ended.out, "alone: 1 rank"), 2) << ended.out;
}

TEST(RunElasticTest, a_rank_that_has_left_is_not_waited_for) {
  const TemporaryFolder folder;
  const Ended ended = run({.arguments = {"-n", "3", "--elastic", "1:2", ELASTIC_PROGRAM, "left"},
                           .variables = {{"LEFT_FILE", folder / "left"}}});
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_EQ(n_lines_with(ended.out, "generation 1: rank 0 of 1"), 1) << ended.out << ended.err;
  EXPECT_EQ(n_lines_with(ended.out, "the work is done"), 1) << ended.out;
}

TEST(RunElasticTest, replacements_that_fail_at_once_harm_nobody_else) {
  const Ended ended = run_elastic(3, "1", {"newcomers", "fail"});
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_EQ(n_lines_with(ended.out, "done"), 2) << ended.out << ended.err;
  EXPECT_GE(n_lines_with(ended.err, " exited with code 7 "), 3) << ended.err;
}

TEST(RunElasticTest, a_replacement_that_does_not_fit_is_rejected_alone) {
  const Ended ended = run_elastic(3, "1", {"newcomers", "unfit"});
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_EQ(n_lines_with(ended.out, "done"), 2) << ended.out << ended.err;
  // Its own error, and the launcher's line.
  for (const std::string& text : {ended.out, ended.err}) {
    EXPECT_GE(n_lines_with(text,
                           "the ranks' floating-point environments differ: rank 0 does not "
                           "round to nearest, rank 2 uses the defaults of IEEE 754"),
              3)
        << ended.out << ended.err;
  }
  EXPECT_GE(n_lines_with(ended.err, "The others go on without this rank"), 3) << ended.err;
}

TEST(RunElasticTest, a_replacement_that_hangs_before_it_joins_is_killed_and_replaced) {
  const TemporaryFolder folder;
  const Ended ended = run({"-n", "3", "--elastic", "3", "--elastic-start", "1", ELASTIC_PROGRAM,
                           "hang", folder / "file"});
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_EQ(n_lines_with(ended.out, "done"), 3) << ended.out << ended.err;
  EXPECT_GE(n_lines_with(ended.err, "did not call init_dist within 1 s: killing it (SIGKILL)"), 1)
      << ended.err;
}

TEST(RunElasticTest, a_rank_that_works_after_the_end_is_left_in_peace) {
  for (const bool finishes : {true, false}) {
    std::vector<std::string> arguments{"end"};
    if (finishes) arguments.emplace_back("finish");
    const Ended ended = run_elastic(3, "1", arguments);
    EXPECT_EQ(ended.exit_code, 128 + SIGKILL) << ended.out << ended.err;
    EXPECT_EQ(n_lines_with(ended.out, "the work is done"), 1) << ended.out << ended.err;
    EXPECT_EQ(n_lines_with(ended.err, "after it had done its part"), finishes ? 1 : 0) << ended.err;
    EXPECT_EQ(n_lines_with(ended.err, "started rank 2 "), finishes ? 0 : 1) << ended.err;
  }
}

TEST(RunElasticTest, elsewhere_regroup_says_what_to_do) {
  const Ended ended = run_elastic(2, "", {"outside"});
  EXPECT_TRUE(contains(ended.out, "`lockstep run -n N --elastic MIN`")) << ended.out;
  EXPECT_EQ(ended.exit_code, 1);
}

TEST(RunElasticTest, limits_that_are_none_are_refused) {
  for (const std::string limits : {"0", "4", "2:1", "2:4", "2:", ":3", "x", "1:3x", "-1"}) {
    const Ended ended = run_elastic(3, limits, {"outside"});
    EXPECT_EQ(ended.exit_code, 2) << limits;
    EXPECT_TRUE(contains(ended.err, "--elastic is '" + limits +
                                        "', expected MIN or MIN:MAX with 1 <= "
                                        "MIN <= MAX <= 3"))
        << ended.err;
  }
}

}  // namespace
}  // namespace lockstep::test
