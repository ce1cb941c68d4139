#include <gtest/gtest.h>

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/temporary_folder.hpp"

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
    std::vector<std::string> arguments{std::to_string(n_steps)};
    arguments.insert(arguments.end(), mode.begin(), mode.end());
    return train_program({ELASTIC_TRAINING, LOCKSTEP_DIGITS}, options, n_steps, arguments);
  }

  /// program: with the arguments before the file for the parameters.
  Trained train_program(const std::vector<std::string>& program,
                        const std::vector<std::string>& options, int n_steps,
                        const std::vector<std::string>& mode) {
    const std::string out = folder_ / ("parameters-" + std::to_string(n_trainings_++));
    std::vector<std::string> arguments = options;
    arguments.insert(arguments.end(), program.begin(), program.end());
    arguments.push_back(out);
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
                       "changed parameters already. Let step_done step the optimizers"))
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

// --- the table of programs and points of elastic_programs.cpp

constexpr int kStepsOfPrograms = 18;
const std::vector<std::string> kPrograms{"branches",   "modes", "options",   "objects", "random",
                                         "accumulate", "two",   "alternate", "by_hand", "shards"};
const std::vector<std::string> kPoints{"unjoined",         "before_forward",
                                       "forward",          "backward",
                                       "between",          "before_step_done",
                                       "after_step_done",  "regroup",
                                       "end_of_epoch",     "validation",
                                       "after_validation", "sent",
                                       "loaded",           "end"};

class ElasticProgramsTest : public ElasticTrainingTest {
 protected:
  Trained alone(const std::string& program) {
    return train_program({ELASTIC_PROGRAMS, program}, {"-n", "1"}, kStepsOfPrograms, {"alone"});
  }
  /// Returns the largest difference from the undisturbed one.
  double expect_same(const Trained& killed, const Trained& undisturbed, const std::string& what) {
    EXPECT_EQ(undisturbed.ended.exit_code, 0) << what << undisturbed.ended.err;
    EXPECT_EQ(killed.ended.exit_code, 0) << what << killed.ended.out << killed.ended.err;
    EXPECT_EQ(killed.bits.size(), 1U) << what << killed.ended.out << killed.ended.err;
    const double difference = largest_difference(killed.parameters, undisturbed.parameters);
    // Adam divides by small numbers.
    const double rounding = what.starts_with("shards") ? 0 : 1e-8;
    EXPECT_LE(difference, rounding) << what << killed.ended.err;
    return difference;
  }
  void kill_at(const std::string& program, const std::string& point, const Trained& undisturbed) {
    const Trained killed = train_program({ELASTIC_PROGRAMS, program}, {"-n", "3", "--elastic", "1"},
                                         kStepsOfPrograms, {point});
    expect_same(killed, undisturbed, program + ", killed at " + point + "\n");
    const bool has_kill = point != "between" || program == "alternate";
    EXPECT_EQ(contains(killed.ended.err, "SIGKILL"), has_kill) << program << point;
  }
};

TEST_F(ElasticProgramsTest, whatever_a_step_reads_is_that_of_an_undisturbed_training) {
  for (const std::string& program : kPrograms) {
    const Trained undisturbed = alone(program);
    for (const std::string point : {"backward", "validation"}) {
      kill_at(program, point, undisturbed);
    }
  }
}

TEST_F(ElasticProgramsTest, wherever_a_rank_is_killed) {
  const Trained undisturbed = alone("alternate");
  for (const std::string& point : kPoints) kill_at("alternate", point, undisturbed);
}

TEST_F(ElasticProgramsTest, the_replacement_draws_as_the_only_rank_left_if_the_lost_one_did) {
  const std::vector<std::string> on_two{"-n", "2", "--elastic", "1"};
  const Trained alike =
      train_program({ELASTIC_PROGRAMS, "random"}, on_two, kStepsOfPrograms, {"backward"});
  expect_same(alike, alone("random"), "random\n");
  const Trained own =
      train_program({ELASTIC_PROGRAMS, "own"}, on_two, kStepsOfPrograms, {"backward"});
  EXPECT_EQ(own.ended.exit_code, 0) << own.ended.err;
  EXPECT_TRUE(contains(own.ended.err, "SIGKILL")) << own.ended.err;
}

/// The whole table, and random ends over all programs: as many runs as LOCKSTEP_FAULT_RUNS says.
TEST_F(ElasticProgramsTest, campaign) {
  const char* const runs = std::getenv("LOCKSTEP_FAULT_RUNS");
  if (runs == nullptr) GTEST_SKIP() << "LOCKSTEP_FAULT_RUNS is not set";
  const char* const seed = std::getenv("LOCKSTEP_FAULT_SEED");
  const unsigned from = seed != nullptr ? static_cast<unsigned>(std::atoi(seed)) : 1;
  long n_kills = 0, n_generations = 0;
  double largest = 0;
  const auto note = [&](const Trained& trained) {
    for (const std::string& line : lines_of(trained.ended.err)) {
      n_generations += contains(line, " generation ");
      n_kills += contains(line, " was killed by ") || contains(line, " exited with code ");
    }
  };
  std::map<std::string, Trained> undisturbed;
  for (const std::string& program : kPrograms) undisturbed.emplace(program, alone(program));
  for (int i = 0; i < std::atoi(runs); ++i) {
    const std::string& program = kPrograms[(from + static_cast<unsigned>(i)) % kPrograms.size()];
    const Trained killed =
        train_program({ELASTIC_PROGRAMS, program}, {"-n", "4", "--elastic", "1"}, kStepsOfPrograms,
                      {"random", "3", std::to_string(from + i)});
    largest = std::max(largest, expect_same(killed, undisturbed.at(program),
                                            fmt::format("{}, seed {}\n", program, from + i)));
    note(killed);
  }
  fmt::print("seeds {} to {}: {} ends, {} generations, largest difference {:.3g}\n", from,
             from + std::atoi(runs) - 1, n_kills, n_generations, largest);
}

TEST_F(ElasticProgramsTest, table) {
  if (std::getenv("LOCKSTEP_FAULT_RUNS") == nullptr) {
    GTEST_SKIP() << "LOCKSTEP_FAULT_RUNS is not set";
  }
  for (const std::string& program : kPrograms) {
    const Trained undisturbed = alone(program);
    for (const std::string& point : kPoints) kill_at(program, point, undisturbed);
  }
}

TEST_F(ElasticProgramsTest, the_same_command_goes_on_after_all_ranks_were_lost) {
  const Trained undisturbed = alone("objects");
  const std::string file = folder_ / "state.pt";
  const auto train_saved = [&](const std::string& point) {
    return train_program({ELASTIC_PROGRAMS, "objects"}, {"-n", "2", "--elastic", "1"},
                         kStepsOfPrograms, {point, "0", "1", file});
  };
  EXPECT_EQ(train_saved("all").ended.exit_code, 128 + SIGKILL);
  const Trained resumed = train_saved("alone");
  expect_same(resumed, undisturbed, "resumed\n");
  EXPECT_TRUE(contains(resumed.ended.out, "begins with step 6")) << resumed.ended.out;
}

TEST_F(ElasticProgramsTest, ranks_that_resume_draw_as_one_only_if_they_did) {
  for (const std::vector<std::string>& run :
       {std::vector<std::string>{"-n", "2"},
        std::vector<std::string>{"-n", "2", "--elastic", "2"}}) {
    const std::string file = folder_ / fmt::format("own {}.pt", run.size());
    for (int attempt = 0; attempt < 2; ++attempt) {
      const Trained ended = train_program({ELASTIC_PROGRAMS, "own_first"}, run, kStepsOfPrograms,
                                          {"alone", "0", "1", file});
      EXPECT_EQ(ended.ended.exit_code, 0) << attempt << ended.ended.err;
    }
  }
}

TEST_F(ElasticProgramsTest, a_rank_that_ends_after_the_training_leaves_the_others_at_work) {
  const Trained undisturbed = alone("objects");
  const Trained crashed = train_program(
      {ELASTIC_PROGRAMS, "objects"}, {"-n", "3", "--elastic", "1"}, kStepsOfPrograms, {"complete"});
  EXPECT_EQ(crashed.ended.exit_code, 128 + SIGKILL) << crashed.ended.out << crashed.ended.err;
  EXPECT_TRUE(contains(crashed.ended.err, "after it had done its part")) << crashed.ended.err;
  // Place 0 has written it after that.
  EXPECT_LE(largest_difference(crashed.parameters, undisturbed.parameters), 1e-8);
}

TEST_F(ElasticProgramsTest, a_replacement_that_cannot_take_the_state_ends_itself) {
  const Trained undisturbed = alone("objects");
  const Trained edited = train_program({ELASTIC_PROGRAMS, "objects"}, {"-n", "3", "--elastic", "1"},
                                       kStepsOfPrograms, {"edited"});
  expect_same(edited, undisturbed, "edited\n");
  EXPECT_TRUE(contains(edited.ended.err, "rank 2 cannot take the state of rank 0"))
      << edited.ended.err;
  EXPECT_EQ(edited.n_ranks, 3U) << edited.ended.out << edited.ended.err;
}

TEST_F(ElasticProgramsTest, what_would_be_lost_is_refused_by_name) {
  const std::map<std::string, std::string> refusals{
      {"inside", "parameter 'first.weight' of part 0 has got a gradient, and no optimizer"},
      {"unlisted", "this torch::optim::Adam is not in the ElasticState"},
      {"micro_steps", "no parameter has changed in this step, although 'first.weight' of part 0"},
      {"continue", "the loop goes on to step 1, and 0 steps are complete"},
      {"break", "the loop goes on after epoch 0 with 1 of its 3 steps complete"},
  };
  for (const auto& [program, text] : refusals) {
    const Trained refused =
        train_program({ELASTIC_PROGRAMS, program}, {"-n", "2"}, kStepsOfPrograms, {"alone"});
    EXPECT_EQ(refused.ended.exit_code, 1) << program << refused.ended.out;
    EXPECT_TRUE(contains(refused.ended.err, text)) << program << refused.ended.err;
  }
}

TEST_F(ElasticProgramsTest, a_world_that_no_launcher_can_keep_running_is_refused) {
  const Trained refused = train_program({ELASTIC_PROGRAMS, "gloo"}, {"-n", "2", "--elastic", "1"},
                                        kStepsOfPrograms, {"alone"});
  EXPECT_EQ(refused.ended.exit_code, 1) << refused.ended.out;
  EXPECT_TRUE(contains(refused.ended.err, "and this one is over gloo: leave the backend out"))
      << refused.ended.err;
}

}  // namespace
}  // namespace lockstep::test
