#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "helpers.hpp"
#include "next_world.hpp"
#include "support/expect.hpp"
#include "support/ranks.hpp"

// Layers find the world again, however the former one ended; what cannot says so.
namespace lockstep::nn {
namespace {

using testing::LayersOfAWorld;
using Problems = std::vector<std::string>;

TEST(NextWorldTest, after_run_ranks) {
  std::vector<LayersOfAWorld> layers(4);
  const auto of = [&](int rank) -> LayersOfAWorld& {
    return layers[static_cast<std::size_t>(rank)];
  };
  testing::on_ranks(4, [&](int rank) { EXPECT_EQ(of(rank).use(), Problems()); });
  testing::on_ranks(2, [&](int rank) { EXPECT_EQ(of(rank).use_in_the_next(), Problems()); });
  EXPECT_EQ(of(3).use_alone(), Problems());
}

TEST(NextWorldTest, a_thread_of_run_ranks_that_has_left) {
  testing::on_ranks(2, [](int) {
    LayersOfAWorld layers;
    EXPECT_EQ(layers.use(), Problems());
    barrier();
    destroy_dist();
    EXPECT_EQ(layers.use_alone(), Problems());
  });
}

TEST(NextWorldTest, a_helper_thread_keeps_what_the_rank_has_bound) {
  testing::on_ranks(2, [](int rank) {
    SyncBatchNorm1d layer(SyncBatchNormOptions(1).momentum(1));
    const auto forward = [&layer, rank] { layer->forward(at::full({2, 1}, rank + 1.0)); };
    forward();
    std::thread(forward).join();
    EXPECT_EQ(layer->running_mean.item<double>(), 1.5);
    EXPECT_EQ(layer->num_batches_tracked.item<std::int64_t>(), 2);
  });
}

TEST(NextWorldTest, over_gloo) {
  test::run_as({test::Form::gloo, 2}, [] {
    LayersOfAWorld layers;
    EXPECT_EQ(layers.use(), Problems());
    destroy_dist();
    init_dist({.backend = "gloo"});
    EXPECT_EQ(layers.use_in_the_next(), Problems());
    destroy_dist();
    EXPECT_EQ(layers.use_alone(), Problems());
  });
}

TEST(NextWorldTest, a_wrapper_made_before_the_world) {
  std::vector<DistributedDataParallel<torch::nn::Linear>> made;
  for (int i = 0; i < 2; ++i) made.emplace_back(torch::nn::Linear(1, 1));
  testing::on_ranks(2, [&](int rank) {
    const auto text = testing::usage_error([&] {
      made[static_cast<std::size_t>(rank)].forward(at::ones({1, 1}));
    });
    test::expect_contains(text, "was made before this rank was in a world");
  });
}

test::Ended run_program(std::vector<std::string> options, const std::vector<std::string>& mode) {
  options.emplace_back(NEXT_WORLD_PROGRAM);
  options.insert(options.end(), mode.begin(), mode.end());
  return test::run(options);
}

TEST(NextWorldTest, under_lockstep_run) {
  struct ElasticRun {
    std::vector<std::string> options;
    const char* how;
    const char* generation;
  };
  for (const ElasticRun& one : {ElasticRun{{"-n", "2"}, "again", ""},
                                ElasticRun{{"-n", "2", "--elastic", "2"}, "again", ""},
                                ElasticRun{{"-n", "2", "--elastic", "2"}, "regroup", "0"},
                                ElasticRun{{"-n", "2", "--elastic", "2"}, "twice", "1"}}) {
    const test::Ended ended = run_program(one.options, {one.how});
    EXPECT_EQ(ended.exit_code, 0) << one.how << ended.out << ended.err;
    EXPECT_TRUE(test::contains(ended.out, "rank 0 is done")) << ended.out << ended.err;
    EXPECT_TRUE(test::contains(ended.out, "rank 1 is done")) << ended.out << ended.err;
    if (one.generation[0] == 0) continue;
    EXPECT_TRUE(test::contains(ended.out, std::string("is of generation ") + one.generation))
        << ended.out;
  }
}

/// The sum that the training ends with, from its output.
double sum_of(const test::Ended& ended) {
  const std::size_t at = ended.out.find("sum ");
  return at == std::string::npos ? std::nan("") : std::stod(ended.out.substr(at + 4));
}

TEST(NextWorldTest, layers_that_run_elastic_converts_in_each_generation) {
  const test::Ended alone = run_program({"-n", "1"}, {"train"});
  ASSERT_EQ(alone.exit_code, 0) << alone.out << alone.err;
  for (const char* where : {"inside", "outside"}) {
    const test::Ended killed = run_program({"-n", "3", "--elastic", "1"}, {"train", where});
    ASSERT_EQ(killed.exit_code, 0) << killed.out << killed.err;
    EXPECT_TRUE(test::contains(killed.err, "SIGKILL")) << killed.err;
    EXPECT_NEAR(sum_of(killed), sum_of(alone), 1e-9) << where;
  }
}

TEST(NextWorldTest, a_wrapper_of_an_earlier_generation_ends_the_training_at_once) {
  const test::Ended ended = run_program({"-n", "3", "--elastic", "1:2"}, {"wrapper"});
  EXPECT_NE(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_TRUE(test::contains(ended.out, "attempt 2: UsageError")) << ended.out;
  EXPECT_FALSE(test::contains(ended.out, "attempt 3")) << ended.out;
}

}  // namespace
}  // namespace lockstep::nn
