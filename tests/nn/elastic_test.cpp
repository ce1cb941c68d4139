#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <algorithm>
#include <lockstep/error.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/nn/distributed_sampler.hpp>
#include <lockstep/nn/elastic.hpp>
#include <vector>

// The parts of run_elastic that need no launcher; tests/examples has the others.
namespace lockstep::nn {
namespace {

using Samples = std::vector<std::size_t>;

/// The samples of a step, by position: rank 0's first, rank 1's first, ...
Samples step_of(int n_ranks, std::int64_t step, const ElasticSamplerOptions& options,
                std::size_t n_samples) {
  std::vector<Samples> shares(static_cast<std::size_t>(n_ranks));
  run_ranks(n_ranks, [&](int rank) {
    shares[static_cast<std::size_t>(rank)] = ElasticSampler(n_samples, options).batch(step);
  });
  Samples all;
  for (std::size_t i = 0; i < shares[0].size(); ++i) {
    for (const Samples& share : shares) {
      if (i < share.size()) all.push_back(share[i]);
    }
  }
  return all;
}

TEST(ElasticSamplerTest, a_step_has_the_same_samples_over_any_number_of_ranks) {
  constexpr std::size_t kSamples = 23;
  for (const bool shuffle : {false, true}) {
    const ElasticSamplerOptions options{.global_batch = 5, .shuffle = shuffle, .seed = 3};
    Samples epoch;
    for (std::int64_t step = 0; step < 5; ++step) {
      const Samples alone = step_of(1, step, options, kSamples);
      EXPECT_EQ(alone.size(), step == 4 ? 3U : 5U);
      for (const int n_ranks : {2, 3, 4, 7}) {
        EXPECT_EQ(step_of(n_ranks, step, options, kSamples), alone) << n_ranks;
      }
      epoch.insert(epoch.end(), alone.begin(), alone.end());
    }
    DistributedSampler all(kSamples, {.shuffle = shuffle, .seed = 3});
    EXPECT_EQ(epoch, all.next(kSamples).value());
    EXPECT_EQ(step_of(1, 5, options, kSamples) == step_of(1, 0, options, kSamples), !shuffle);
  }
}

TEST(ElasticSamplerTest, the_last_step_of_an_epoch_can_be_left_out) {
  const ElasticSampler sampler(23, {.global_batch = 5, .drop_last = true});
  EXPECT_EQ(sampler.steps_per_epoch(), 4U);
  EXPECT_EQ(sampler.epoch_of(3), 0U);
  EXPECT_EQ(sampler.epoch_of(4), 1U);
  EXPECT_EQ(ElasticSampler(23, {.global_batch = 5}).steps_per_epoch(), 5U);
}

TEST(ElasticSamplerTest, batches_that_make_no_step_are_refused) {
  EXPECT_THROW(ElasticSampler(0, {.global_batch = 5}), UsageError);
  EXPECT_THROW(ElasticSampler(5, {.global_batch = 0}), UsageError);
  EXPECT_THROW(ElasticSampler(5, {.global_batch = 6, .drop_last = true}), UsageError);
}

TEST(ElasticStateTest, shares_of_different_sizes_count_as_one_batch) {
  run_ranks(3, [](int rank) {
    torch::nn::Linear layer(2, 1);
    ElasticState state({layer});
    // 0, 1 and 2 samples: sums over them, times the factors, times 3 ranks, are the mean over 3.
    EXPECT_DOUBLE_EQ(state.scale(static_cast<std::size_t>(rank)), rank * 3 / 3.0);
    EXPECT_THROW(state.scale(0), UsageError);
  });
}

TEST(ElasticStateTest, steps_are_those_of_run_elastic) {
  torch::nn::Linear layer(2, 1);
  ElasticState state({layer});
  EXPECT_THROW(state.step_done(), UsageError);
  EXPECT_THROW(state.set_step(-1), UsageError);
  state.set_step(7);
  EXPECT_EQ(state.step(), 7);
}

TEST(RunElasticTest, threads_of_run_ranks_train_in_their_world) {
  std::vector<torch::Tensor> weights(3);
  run_ranks(3, [&](int rank) {
    torch::nn::Linear layer(2, 1);
    const torch::Tensor drawn = layer->weight.detach().clone();
    if (rank == 0) weights[0] = drawn;
    ElasticState state({layer});
    run_elastic(state, [&] {
      EXPECT_EQ(default_group().size(), 3);
      state.set_step(4);
      state.step_done();
    });
    EXPECT_EQ(state.step(), 5);
    if (rank != 0) weights[static_cast<std::size_t>(rank)] = layer->weight.detach();
  });
  EXPECT_TRUE(weights[1].equal(weights[0]));
  EXPECT_TRUE(weights[2].equal(weights[0]));
}

TEST(RunElasticTest, goes_on_in_a_world_that_no_launcher_keeps_running) {
  torch::nn::Linear layer(2, 1);
  ElasticState state({layer});
  init_dist();
  int n_calls = 0;
  for (int i = 0; i < 2; ++i) run_elastic(state, [&] { ++n_calls; });
  EXPECT_EQ(n_calls, 2);
  EXPECT_TRUE(is_distributed());
  destroy_dist();
}

TEST(RunElasticTest, a_step_that_is_set_has_the_random_numbers_of_that_step) {
  const auto drawn = [](bool is_inside) {
    torch::Tensor numbers;
    run_ranks(1, [&] {
      torch::nn::Linear layer(2, 1);
      ElasticState state({layer}, {.seed = 3});
      if (!is_inside) state.set_step(4);
      run_elastic(state, [&] {
        if (is_inside) state.set_step(4);
        numbers = torch::rand({8});
      });
    });
    return numbers;
  };
  EXPECT_TRUE(drawn(/*is_inside=*/true).equal(drawn(/*is_inside=*/false)));
}

}  // namespace
}  // namespace lockstep::nn
