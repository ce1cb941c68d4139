#include "train/train.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <lockstep/error.hpp>
#include <lockstep/sync_master.hpp>
#include <lockstep/world.hpp>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "support/temporary_folder.hpp"
#include "train/data.hpp"
#include "train/report.hpp"

namespace train {
namespace {

constexpr std::size_t kSteps = 50;
constexpr double kSame = 1e-9;
constexpr double kOther = 1e-3;

const Dataset& digits() {
  static const Dataset data = read_dataset(LOCKSTEP_DIGITS);
  return data;
}

/// A batch of 8 in f64, on one thread.
Options small_options() {
  Options options;
  options.batch = 8;
  options.max_steps = kSteps;
  options.precision = "f64";
  options.threads = 1;
  return options;
}

class TrainTest : public testing::Test {
 protected:
  /// Returns what rank 0 returns.
  std::vector<EpochResult> train_over(int n_ranks, const Options& options) {
    std::vector<EpochResult> epochs;
    lockstep::run_ranks(n_ranks, [&](int rank) {
      auto results = train::run(options, digits());
      if (rank == 0) epochs = std::move(results);
    });
    return epochs;
  }

  double difference(const std::string& a, const std::string& b) {
    return compare(small_options(), directory_ / a, directory_ / b).largest;
  }

  /// What one rank with the whole batch makes of it.
  std::string train_alone() {
    Options options = small_options();
    options.save = directory_ / "alone.pt";
    train_over(1, options);
    return options.save;
  }

  double difference_to_alone(int n_ranks, Options options) {
    options.save = directory_ / "ranks.pt";
    train_over(n_ranks, options);
    train_alone();
    return difference("alone.pt", "ranks.pt");
  }

  template <class E>
  void expect_error(const Options& options, const std::string& part, int n_ranks = 1) {
    try {
      train_over(n_ranks, options);
      ADD_FAILURE() << "no error";
    } catch (const E& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "no \"" << part << "\" in: " << error.what();
    }
  }

  lockstep::test::TemporaryFolder directory_;
};

TEST_F(TrainTest, learns_the_digits) {
  Options options = small_options();
  options.precision = "f32";
  options.max_steps = 0;
  options.epochs = 2;
  const auto epochs = train_over(1, options);
  ASSERT_EQ(epochs.size(), 2U);
  EXPECT_LT(epochs[1].loss, epochs[0].loss);
  EXPECT_GT(epochs[1].test_accuracy, 0.9);
}

TEST_F(TrainTest, sync_bn_on_2_ranks_is_one_rank) {
  EXPECT_LT(difference_to_alone(2, small_options()), kSame);
}

TEST_F(TrainTest, sync_bn_on_3_ranks_with_unequal_parts_is_one_rank) {
  EXPECT_LT(difference_to_alone(3, small_options()), kSame);
}

TEST_F(TrainTest, sync_bn_on_4_ranks_is_one_rank) {
  EXPECT_LT(difference_to_alone(4, small_options()), kSame);
}

TEST_F(TrainTest, data_parallel_4_is_one_replica_over_an_epoch) {
  Options options = small_options();
  options.max_steps = 0;
  options.epochs = 1;
  options.save = directory_ / "one.pt";
  train_over(1, options);
  options.save = directory_ / "four.pt";
  options.data_parallel = 4;
  train_over(1, options);
  EXPECT_LT(difference("one.pt", "four.pt"), kSame);
  std::filesystem::remove(options.save);
  options.sync_bn = false;
  train_over(1, options);
  EXPECT_GT(difference("one.pt", "four.pt"), kOther);
}

TEST_F(TrainTest, data_parallel_2_on_2_ranks_is_one_replica) {
  Options options = small_options();
  options.data_parallel = 2;
  EXPECT_LT(difference_to_alone(2, options), kSame);
}

TEST_F(TrainTest, replicas_example_says_the_numbers_are_the_same) {
  const std::string command = std::string(LOCKSTEP_REPLICAS) + " " + LOCKSTEP_TRAIN +
                              " --max-steps 20 --data " + LOCKSTEP_DIGITS + " > " +
                              directory_ / "output";
  const int status = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(TrainTest, plain_bn_on_4_ranks_is_not) {
  Options options = small_options();
  options.sync_bn = false;
  EXPECT_GT(difference_to_alone(4, options), kOther);
}

TEST_F(TrainTest, loss_curves_in_f32) {
  Options options = small_options();
  options.precision = "f32";
  options.max_steps = 0;
  options.epochs = 1;
  const auto loss = [&](int n_ranks, bool sync_bn) {
    options.sync_bn = sync_bn;
    return train_over(n_ranks, options).at(0).loss;
  };
  const double alone = loss(1, /*sync_bn=*/false);
  EXPECT_NEAR(loss(4, /*sync_bn=*/true), alone, 0.02 * alone);
  EXPECT_GT(loss(4, /*sync_bn=*/false), 1.2 * alone);
}

TEST_F(TrainTest, sync_bn_on_3_processes_is_one_rank) {
  const std::string ranks = directory_ / "processes.pt";
  const std::string command = std::string(LOCKSTEP_CLI) + " run -n 3 -- " + LOCKSTEP_TRAIN +
                              " --batch 8 --precision f64 --max-steps 50 --threads 1 --save " +
                              ranks + " --data " + LOCKSTEP_DIGITS;
  const int status = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(status));
  ASSERT_EQ(WEXITSTATUS(status), 0);
  train_alone();
  EXPECT_LT(difference("alone.pt", "processes.pt"), kSame);
}

TEST_F(TrainTest, wrong_file_ends_every_process_before_it_joins) {
  const std::string command = std::string(LOCKSTEP_CLI) + " run -n 3 -- " + LOCKSTEP_TRAIN +
                              " --data " + directory_ / "nowhere" + " 2> " + directory_ / "errors";
  const int status = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 1);
  std::ifstream file(directory_ / "errors");
  const std::string errors{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(errors.find("nowhere: expected a folder"), std::string::npos) << errors;
}

TEST_F(TrainTest, resume_takes_the_same_steps) {
  Options options = small_options();
  options.save = directory_ / "half.pt";
  options.max_steps = 17;  // in the midst of an epoch
  train_over(2, options);
  options.load = options.save;
  options.save = directory_ / "resumed.pt";
  options.max_steps = 30;
  train_over(2, options);
  options.load.clear();
  options.save = directory_ / "straight.pt";
  train_over(2, options);
  EXPECT_EQ(difference("straight.pt", "resumed.pt"), 0);
  EXPECT_GT(difference("straight.pt", "half.pt"), 0);
}

TEST_F(TrainTest, resume_over_an_epoch_has_its_whole_loss) {
  Options options = small_options();
  options.precision = "f32";
  options.batch = 240;  // 6 steps an epoch
  options.epochs = 2;
  options.max_steps = 0;
  const auto straight = train_over(1, options);
  options.save = directory_ / "half.pt";
  options.max_steps = 8;
  train_over(1, options);
  options.load = options.save;
  options.max_steps = 0;
  const auto resumed = train_over(1, options);
  ASSERT_EQ(resumed.size(), 1U);
  EXPECT_EQ(resumed.back().loss, straight.back().loss);
  EXPECT_EQ(resumed.back().test_accuracy, straight.back().test_accuracy);
}

TEST_F(TrainTest, rank_0_alone_has_the_checkpoint) {
  Options options = small_options();
  options.save = directory_ / "one.pt";
  options.max_steps = 1;
  train_over(2, options);
  options.max_steps = 2;
  lockstep::run_ranks(2, [&](int rank) {
    Options own = options;
    own.n_restarts = 1;
    if (rank == 1) own.save = directory_ / "nowhere.pt";
    const auto epochs = train::run(own, digits());
    ASSERT_EQ(epochs.size(), 1U);
    EXPECT_EQ(epochs[0].step, 2U);
  });
  EXPECT_FALSE(std::filesystem::exists(directory_ / "nowhere.pt"));
}

TEST_F(TrainTest, restart_goes_on_from_what_it_saved) {
  Options options = small_options();
  options.max_steps = 3;
  options.save = directory_ / "one.pt";
  options.n_restarts = 1;  // before there was a checkpoint
  EXPECT_EQ(train_over(1, options).size(), 1U);
  // The last one was complete.
  EXPECT_TRUE(train_over(1, options).empty());
  options.max_steps = 4;
  EXPECT_EQ(train_over(1, options).at(0).step, 4U);
  // The first start takes no older training's checkpoint, and none of it is overwritten.
  options.n_restarts = 0;
  expect_error<std::invalid_argument>(options, "this file already exists");
  options.load = options.save;
  options.max_steps = 5;
  EXPECT_EQ(train_over(1, options).at(0).step, 5U);
}

TEST_F(TrainTest, checkpoint_of_something_else) {
  Options options = small_options();
  options.max_steps = 1;
  options.save = directory_ / "one.pt";
  train_over(1, options);
  options.load = options.save;
  expect_error<std::invalid_argument>(options, "has done 1 steps");
  options.max_steps = 2;
  options.seed = 5;
  expect_error<std::invalid_argument>(options, "--seed 1, got");
  options.seed = 1;
  options.batch = 16;
  expect_error<std::invalid_argument>(options, "--batch 8");
  options = small_options();
  options.load = directory_ / "one.pt";
  options.precision = "f32";
  expect_error<lockstep::UsageError>(options,
                                     "'0.weight' is Double [16, 1, 3, 3] in the file, and Float");
  options.precision = "f64";
  options.model = "resnet18";
  expect_error<lockstep::UsageError>(options, "in the file, and Double [64, 1, 3, 3]");
}

TEST_F(TrainTest, checkpoint_absent_or_cut_short) {
  Options options = small_options();
  options.load = directory_ / "nowhere.pt";
  expect_error<lockstep::UsageError>(options, "nowhere.pt: No such file");
  options.load = train_alone();
  std::filesystem::resize_file(options.load, std::filesystem::file_size(options.load) / 2);
  expect_error<lockstep::UsageError>(options, "alone.pt");
}

TEST_F(TrainTest, save_leaves_only_the_checkpoint) {
  Options options = small_options();
  options.max_steps = 1;
  options.save = directory_ / "one.pt";
  train_over(1, options);
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory_.path())) {
    names.push_back(entry.path().filename().string());
  }
  EXPECT_EQ(names, std::vector<std::string>{"one.pt"});

  std::filesystem::create_directory(directory_ / "taken");
  options.save = directory_ / "taken";
  expect_error<lockstep::UsageError>(options, "taken");
  options.save = directory_ / "nowhere/one.pt";  // found before the first step
  expect_error<lockstep::UsageError>(options, "nowhere");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_.path()), {}), 2);
}

TEST_F(TrainTest, resnet18_is_another_network) {
  Options options = small_options();
  options.max_steps = 1;
  options.save = directory_ / "convnet.pt";
  train_over(1, options);
  options.model = "resnet18";
  options.precision = "f32";
  options.save = directory_ / "resnet18.pt";
  train_over(1, options);
  EXPECT_EQ(compare(options, options.save, options.save).largest, 0);
  EXPECT_THROW(difference("convnet.pt", "resnet18.pt"), lockstep::UsageError);
}

TEST_F(TrainTest, batch_that_does_not_fit) {
  Options options = small_options();
  options.batch = 2;
  expect_error<std::invalid_argument>(options, "at least one image for each of 3 ranks",
                                      /*n_ranks=*/3);
  options.batch = 1441;
  expect_error<std::invalid_argument>(options, "at most the 1440 images");
}

TEST_F(TrainTest, metrics_are_json_lines) {
  Options options = small_options();
  options.precision = "f32";
  options.batch = 240;
  options.epochs = 2;
  options.max_steps = 0;
  options.metrics = directory_ / "metrics.jsonl";
  options.metrics_every = 4;
  std::vector<EpochResult> epochs;
  lockstep::run_ranks(2, [&](int rank) {
    auto results = train::run(options, digits());
    if (rank == 1) epochs = std::move(results);  // all ranks have the same
  });
  std::vector<nlohmann::json> lines;
  std::ifstream file(options.metrics);
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(lines.size(), 3U + 2U + 1U);
  EXPECT_EQ(lines[0]["event"], "steps");
  EXPECT_EQ(lines[0]["step"], 4);
  EXPECT_EQ(lines[1]["event"], "epoch");
  EXPECT_EQ(lines[1]["loss"].get<double>(), epochs[0].loss);
  EXPECT_EQ(lines[4]["test_accuracy"].get<double>(), epochs[1].test_accuracy);
  EXPECT_EQ(lines[5]["event"], "summary");
  EXPECT_EQ(lines[5]["model"], "convnet");
  EXPECT_EQ(lines[5]["ranks"], 2);
  EXPECT_EQ(lines[5]["sync_bn"], true);
  EXPECT_EQ(lines[5]["loss"].get<double>(), epochs[1].loss);
  EXPECT_GT(lines[5]["images_per_second"].get<double>(), 0);
}

TEST_F(TrainTest, metrics_that_cannot_be_written) {
  Options options = small_options();
  options.max_steps = 1;
  options.metrics = directory_ / "nowhere/metrics.jsonl";
  expect_error<std::system_error>(options, "nowhere/metrics.jsonl: No such file");
  options.metrics = "/dev/full";
  expect_error<std::system_error>(options, "cannot write /dev/full");
}

TEST(ProgressTest, bar_fills_up) {
  EXPECT_EQ(progress_bar(0, 180), "[" + std::string(40, '.') + "]");
  EXPECT_EQ(progress_bar(90, 180), "[" + std::string(20, '#') + std::string(20, '.') + "]");
  EXPECT_EQ(progress_bar(180, 180), "[" + std::string(40, '#') + "]");
}

TEST_F(TrainTest, options_that_mean_nothing_are_rejected) {
  const auto text_of = [&](const std::string& options) {
    const auto file = directory_ / "errors";
    const std::string command = std::string(LOCKSTEP_TRAIN) + " " + options + " >" + file + " 2>&1";
    const int status = std::system(command.c_str());
    EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 2) << options;
    std::ifstream stream(file);
    return std::string{std::istreambuf_iterator<char>(stream), {}};
  };
  for (const char* const value : {"-1", "1.5", "99999999999999999999", "x"}) {
    const std::string text = text_of(std::string("--seed ") + value);
    EXPECT_NE(text.find(value), std::string::npos) << text;
    EXPECT_NE(text.find("--seed"), std::string::npos) << text;
  }
  for (const char* const option :
       {"--epochs -1", "--max-steps -1", "--batch 0", "--batch -1", "--threads -1",
        "--data-parallel 0", "--metrics-every -1", "--model mlp", "--precision f16",
        "--sync-bn maybe", "--compare one.pt", "--unknown"}) {
    text_of(option);
  }
}

}  // namespace
}  // namespace train
