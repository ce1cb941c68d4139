#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/distributed_sampler.hpp>
#include <lockstep/nn/elastic.hpp>
#include <lockstep/world.hpp>
#include <string>
#include <utility>
#include <vector>

#include "nn/elastic/kept_state.hpp"
#include "support/temporary_folder.hpp"

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

TEST(ElasticSamplerTest, micro_batches_are_consecutive_parts_of_a_step) {
  const ElasticSampler sampler(23, {.global_batch = 9, .micro_batches = 2});
  EXPECT_EQ(sampler.n_samples(0), 9U);
  EXPECT_EQ(sampler.n_samples(2), 5U);
  run_ranks(1, [&] {
    for (std::int64_t step = 0; step < 3; ++step) {
      Samples all = sampler.batch(step, std::size_t{0});
      EXPECT_EQ(all.size(), sampler.n_samples(step) / 2);
      for (const std::size_t sample : sampler.batch(step, std::size_t{1})) all.push_back(sample);
      EXPECT_EQ(all, sampler.batch(step));
    }
    EXPECT_THROW(sampler.batch(0, std::size_t{2}), UsageError);
  });
  EXPECT_THROW(ElasticSampler(5, {.global_batch = 5, .micro_batches = 0}), UsageError);
}

TEST(ElasticStateTest, a_step_of_known_size_is_scaled_alike) {
  run_ranks(2, [](int rank) {
    torch::nn::Linear layer(2, 1);
    ElasticState state({layer});
    const auto own = static_cast<std::size_t>(rank + 1);
    EXPECT_DOUBLE_EQ(state.scale(own, std::size_t{3}), state.scale(own));
  });
}

TEST(ElasticStateTest, epochs_end_once_and_go_on_from_a_step) {
  run_ranks(2, [](int rank) {
    torch::nn::Linear layer(2, 1);
    ElasticState state({layer});
    const ElasticSampler sampler(6, {.global_batch = 2});
    EXPECT_THROW(state.epochs(sampler, 3), UsageError);
    state.set_step(4);
    std::vector<std::pair<std::size_t, std::int64_t>> seen;
    std::vector<std::size_t> ends;
    run_elastic(state, [&] {
      for (const std::size_t epoch : state.epochs(sampler, 3)) {
        for (const std::int64_t step : sampler.steps(state)) {
          seen.emplace_back(epoch, step);
          state.step_done();
        }
        ends.push_back(epoch);
      }
    });
    using Seen = std::vector<std::pair<std::size_t, std::int64_t>>;
    EXPECT_EQ(seen, (Seen{{1, 4}, {1, 5}, {2, 6}, {2, 7}, {2, 8}})) << rank;
    EXPECT_EQ(ends, (Samples{1, 2}));
    EXPECT_EQ(state.step(), 9);
    EXPECT_EQ(state.epoch_ends(), 3);
    state.set_step(6, 1);  // the end of the second epoch is not complete
    ends.clear();
    run_elastic(state, [&] {
      for (const std::size_t epoch : state.epochs(sampler, 2)) {
        for (const std::int64_t step : sampler.steps(state)) FAIL() << step;
        ends.push_back(epoch);
      }
    });
    EXPECT_EQ(ends, (Samples{1}));
  });
}

TEST(ElasticStateTest, right_programs_are_not_refused) {
  run_ranks(1, [] {
    torch::nn::Linear layer(2, 1), target(2, 1);
    torch::optim::SGD optimizer(layer->parameters(), /*defaults=*/0.0);  // in warm-up
    ElasticState state({layer, target, optimizer});
    const auto input = torch::ones({3, 2});
    run_elastic(state, [&] {
      layer->forward(input).sub(target->forward(input).detach()).square().sum().backward();
      state.step_done({optimizer});
      state.step_done();
      layer->weight.mutable_grad().fill_(std::numeric_limits<float>::infinity());
      optimizer.param_groups()[0].options().set_lr(0.1);
      state.step_done();  // as a scaler leaves it out
      layer->weight.mutable_grad().fill_(1);
      {
        const torch::NoGradGuard no_graph;
        layer->weight.sub_(1);  // by hand
      }
      state.step_done();
      EXPECT_THROW(state.step_done(), UsageError);
    });
  });
}

TEST(ElasticStateTest, a_parameter_that_only_the_program_changes_is_listed) {
  run_ranks(1, [] {
    torch::nn::Linear layer(2, 1);
    const auto train = [&](ElasticOptions options) {
      ElasticState state({layer}, std::move(options));
      run_elastic(state, [&] {
        layer->forward(torch::ones({3, 2})).sum().backward();
        state.step_done([] {});
      });
    };
    EXPECT_THROW(train({}), UsageError);
    train({.by_hand = layer->parameters()});
    layer->weight.set_requires_grad(false);
    layer->bias.set_requires_grad(false);
    ElasticState state({layer});
    run_elastic(state, [&] { state.step_done(); });
  });
}

TEST(ElasticStateTest, buffers_whose_type_changes_are_set_back) {
  for (const bool snapshot : {false, true}) {
    torch::nn::Linear layer(2, 1);
    const auto buffer = layer->register_buffer("buffer", torch::zeros({1}));
    KeptState state({layer}, snapshot);
    const auto set = [&](std::int64_t value, torch::ScalarType type) {
      buffer.set_data(torch::full({1}, value, type));
    };
    constexpr std::int64_t kValue = (1 << 24) + 1;  // a float rounds it
    for (const auto type : {torch::kInt64, torch::kDouble}) {
      set(kValue, type);
      state.keep();
      for (int attempt = 0; attempt < 2; ++attempt) {
        set(8, torch::kFloat);
        state.set_back();
        EXPECT_EQ(buffer.item<double>(), kValue);
        EXPECT_EQ(buffer.scalar_type(), type);
      }
    }
  }
}

TEST(ElasticStateTest, buffers_that_are_more_than_values_are_set_back) {
  torch::nn::Linear layer(2, 1);
  const auto quantized = [](double value, double scale) {
    return at::quantize_per_tensor(torch::tensor({value}, torch::kFloat), scale, 0, torch::kQInt8);
  };
  const auto scaled = layer->register_buffer("scaled", quantized(0, 1));
  const auto sparse = layer->register_buffer("sparse", torch::eye(2).to_sparse());
  KeptState state({layer}, /*snapshot=*/false);  // archives have no such tensors
  const auto set = [&](int value) {
    scaled.set_data(quantized(value, 1.0 / value));
    sparse.set_data((torch::eye(2) * value).to_sparse());
  };
  for (const int kept : {1, 2, 4}) {
    set(kept);
    state.keep();
    for (int attempt = 0; attempt < 2; ++attempt) {
      set(8);
      state.set_back();
      EXPECT_EQ(scaled.dequantize().item<double>(), kept);
      EXPECT_TRUE(sparse.to_dense().equal(torch::eye(2) * kept));
    }
  }
}

TEST(ElasticStateTest, a_file_resumes_with_everything) {
  const test::TemporaryFolder folder;
  const std::string path = folder / "state.pt";
  run_ranks(2, [&](int rank) {
    const auto train = [&](std::size_t n_epochs, std::size_t global_batch = 2) {
      torch::nn::Linear layer(2, 1);
      for (const torch::Tensor& parameter : layer->parameters()) parameter.detach().fill_(0.5);
      torch::optim::SGD optimizer(layer->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      SavedScheduler<torch::optim::StepLR> schedule(optimizer, /*step_size=*/2, /*gamma=*/0.5);
      ElasticState state({layer, optimizer, schedule}, {.save = path});
      const ElasticSampler sampler(6, {.global_batch = global_batch});
      std::int64_t first = -1;
      run_elastic(state, [&] {
        first = state.step();
        for ([[maybe_unused]] const std::size_t epoch : state.epochs(sampler, n_epochs)) {
          for (const std::int64_t step : sampler.steps(state)) {
            optimizer.zero_grad();
            (layer->forward(torch::ones({1, 2})).sum() * static_cast<double>(step)).backward();
            state.step_done({optimizer});
          }
          schedule.step();
        }
      });
      return std::pair(first, layer->weight.detach().clone());
    };
    EXPECT_EQ(train(2).first, 0);
    // 6 steps in epochs of 3 are 3 epochs of 2 steps, of which two would never be taken.
    EXPECT_THROW(train(5, 3), UsageError);
    const auto [first, resumed] = train(5);
    EXPECT_EQ(first, 6);
    barrier();
    if (rank == 0) std::filesystem::remove(path);
    barrier();
    EXPECT_TRUE(train(5).second.equal(resumed));
    barrier();
    if (rank == 0) std::ofstream(path) << "damaged";
    barrier();
    EXPECT_THROW(train(5), UsageError);
  });
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
