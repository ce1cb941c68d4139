#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "cli/command.hpp"

// run_elastic over ranks that end: the numbers of one rank that nothing disturbs.
namespace lockstep::test {
namespace {

/// What the ranks of a training said, and the parameters with which it ended.
struct Trained {
  Ended ended;
  std::set<std::string> bits;  ///< of all ranks
  std::size_t n_ranks = 0;     ///< that said so
  std::vector<double> parameters;
};

class ElasticTrainingTest : public testing::Test {
 protected:
  Trained train(const std::vector<std::string>& options, int n_steps,
                const std::vector<std::string>& mode) {
    const std::string out = folder_ / ("parameters-" + std::to_string(n_trainings_++));
    std::vector<std::string> arguments = options;
    arguments.insert(arguments.end(),
                     {ELASTIC_TRAINING, LOCKSTEP_DIGITS, out, std::to_string(n_steps)});
    arguments.insert(arguments.end(), mode.begin(), mode.end());
    Trained trained{.ended = run(arguments), .bits = {}, .parameters = {}};
    const std::string steps = ": " + std::to_string(n_steps) + " steps, parameters ";
    for (const std::string& line : lines_of(trained.ended.out)) {
      const std::size_t at = line.find(steps);
      if (at == std::string::npos) continue;
      trained.bits.insert(line.substr(at + steps.size()));
      ++trained.n_ranks;
    }
    const std::string bytes = contents_of(out);
    trained.parameters.resize(bytes.size() / sizeof(double));
    std::memcpy(trained.parameters.data(), bytes.data(), bytes.size());
    return trained;
  }

  TemporaryFolder folder_;
  int n_trainings_ = 0;
};

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  EXPECT_FALSE(a.empty());
  double largest = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    largest = std::max(largest, std::abs(a[i] - b[i]) / std::max(1.0, std::abs(b[i])));
    if (std::isnan(a[i])) return std::nan("");
  }
  return largest;
}

TEST_F(ElasticTrainingTest, ranks_that_end_at_random_times_do_not_change_the_numbers) {
  const Trained alone = train({"-n", "1"}, 150, {"alone"});
  ASSERT_EQ(alone.ended.exit_code, 0) << alone.ended.err;
  const Trained elastic = train({"-n", "4", "--elastic", "1"}, 150, {"random", "5"});
  ASSERT_EQ(elastic.ended.exit_code, 0) << elastic.ended.out << elastic.ended.err;
  EXPECT_TRUE(contains(elastic.ended.out, "5 processes have ended")) << elastic.ended.out;
  EXPECT_GE(elastic.n_ranks, 2U);
  EXPECT_EQ(elastic.bits.size(), 1U) << elastic.ended.out;
  EXPECT_LE(largest_difference(elastic.parameters, alone.parameters), 1e-9);
}

TEST_F(ElasticTrainingTest, a_kill_in_a_step_and_a_rank_that_leaves_before_it_give_the_same_bits) {
  const Trained killed = train({"-n", "4", "--elastic", "1:3"}, 30, {"kill"});
  ASSERT_EQ(killed.ended.exit_code, 0) << killed.ended.out << killed.ended.err;
  const Trained left = train({"-n", "4", "--elastic", "1:3"}, 30, {"leave"});
  ASSERT_EQ(left.ended.exit_code, 0) << left.ended.out << left.ended.err;
  EXPECT_EQ(killed.n_ranks, 3U) << killed.ended.out;
  EXPECT_EQ(killed.bits.size(), 1U) << killed.ended.out;
  EXPECT_EQ(killed.bits, left.bits);
}

TEST_F(ElasticTrainingTest, a_kill_in_the_first_step_after_resuming) {
  const Trained killed = train({"-n", "4", "--elastic", "1:3"}, 20, {"kill", "resumed"});
  ASSERT_EQ(killed.ended.exit_code, 0) << killed.ended.out << killed.ended.err;
  const Trained left = train({"-n", "4", "--elastic", "1:3"}, 20, {"leave", "resumed"});
  ASSERT_EQ(left.ended.exit_code, 0) << left.ended.out << left.ended.err;
  EXPECT_EQ(killed.n_ranks, 3U) << killed.ended.out;
  EXPECT_EQ(killed.bits.size(), 1U) << killed.ended.out;
  EXPECT_EQ(killed.bits, left.bits);
}

TEST_F(ElasticTrainingTest, parameters_changed_in_a_step_that_is_not_complete) {
  const Trained refused = train({"-n", "4", "--elastic", "1:3"}, 20, {"change"});
  EXPECT_EQ(refused.ended.exit_code, 1) << refused.ended.out;
  EXPECT_TRUE(contains(refused.ended.err,
                       "cannot repeat step 10, which was not complete: it has "
                       "changed parameters already. Call step_done() right"))
      << refused.ended.err;
  const Trained repeated = train({"-n", "4", "--elastic", "1:3"}, 20, {"snapshot"});
  EXPECT_EQ(repeated.ended.exit_code, 0) << repeated.ended.out << repeated.ended.err;
  EXPECT_EQ(repeated.bits.size(), 1U) << repeated.ended.out;
  const Trained left = train({"-n", "4", "--elastic", "1:3"}, 20, {"leave"});
  EXPECT_EQ(repeated.bits, left.bits);
}

TEST_F(ElasticTrainingTest, ranks_keep_the_state_of_a_rank_that_is_lost_after_it_gave_it_to_them) {
  const Trained alone = train({"-n", "1"}, 20, {"alone"});
  ASSERT_EQ(alone.ended.exit_code, 0) << alone.ended.err;
  const Trained lost = train({"-n", "4", "--elastic", "1:2"}, 20, {"source"});
  ASSERT_EQ(lost.ended.exit_code, 0) << lost.ended.out << lost.ended.err;
  EXPECT_EQ(lost.n_ranks, 2U) << lost.ended.out;
  EXPECT_EQ(lost.bits.size(), 1U) << lost.ended.out;
  EXPECT_LE(largest_difference(lost.parameters, alone.parameters), 1e-9);
}

TEST_F(ElasticTrainingTest, a_repeated_step_begins_with_its_learning_rate) {
  const Trained killed = train({"-n", "4", "--elastic", "1:3"}, 15, {"kill", "decays"});
  EXPECT_EQ(killed.ended.exit_code, 0) << killed.ended.out << killed.ended.err;
  EXPECT_EQ(killed.n_ranks, 3U) << killed.ended.out;
}

TEST_F(ElasticTrainingTest, an_error_of_each_attempt_without_a_loss_ends_the_training) {
  const Trained ended = train({"-n", "2", "--elastic", "2"}, 20, {"stuck"});
  EXPECT_EQ(ended.ended.exit_code, 1) << ended.ended.out;
  EXPECT_TRUE(contains(ended.ended.err, "a layer of an earlier world")) << ended.ended.err;
}

TEST_F(ElasticTrainingTest, without_elastic_a_loss_ends_the_training) {
  const Trained ended = train({"-n", "4"}, 20, {"kill"});
  EXPECT_EQ(ended.ended.exit_code, 128 + SIGKILL) << ended.ended.out;
  EXPECT_TRUE(contains(ended.ended.err, "rank 3 was killed by signal 9 (SIGKILL)"))
      << ended.ended.err;
}

}  // namespace
}  // namespace lockstep::test
