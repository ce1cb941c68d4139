// Positions in an epoch that another rank, or another number of ranks, loads.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/nn.hpp>

#include <algorithm>
#include <lockstep/objects.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "helpers.hpp"
#include "support/expect.hpp"

namespace lockstep::nn {
namespace distributed_sampler_test {

using testing::on_ranks;

std::string saved(const DistributedSampler& sampler) {
  torch::serialize::OutputArchive archive;
  sampler.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

void load(DistributedSampler& sampler, const std::string& bytes) {
  std::istringstream stream(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  sampler.load(archive);
}

std::size_t n_left(DistributedSampler& sampler) {
  std::size_t n = 0;
  while (const auto batch = sampler.next(10)) n += batch->size();
  return n;
}

/// As save_training and load_training do. Rank 0 has 51 samples and rank 1 has 50.
TEST(DistributedSamplerTest, rank_0s_position_serves_all_ranks) {
  on_ranks(2, [](int rank) {
    for (const std::size_t n_taken : {0U, 20U, 50U, 51U}) {
      DistributedSampler sampler(101), other(101);
      sampler.reset();
      if (n_taken > 0) sampler.next(n_taken);
      std::string bytes = saved(sampler);
      broadcast_object(bytes);
      load(other, bytes);
      const std::size_t n_samples = rank == 0 ? 51 : 50;
      EXPECT_EQ(n_left(other), n_samples - std::min(n_taken, n_samples)) << n_taken;
    }
  });
}

TEST(DistributedSamplerTest, another_number_of_ranks_or_size_is_rejected_within_an_epoch) {
  on_ranks(2, [](int /*rank*/) {
    DistributedSampler sampler(100), alone(100, {.group = Group()}), larger(120);
    for (const std::size_t n_taken : {0U, 20U, 30U}) {  // 0, 20, 50
      if (n_taken > 0) sampler.next(n_taken);
      const std::string bytes = saved(sampler);
      if (n_taken != 20) {
        load(alone, bytes);
        load(larger, bytes);
        EXPECT_EQ(n_left(alone), n_taken == 0 ? 100U : 0U);
        EXPECT_EQ(n_left(larger), n_taken == 0 ? 60U : 0U);
        continue;
      }
      std::string text = testing::usage_error([&] { load(alone, bytes); });
      test::expect_contains(text, "100 samples on 2 ranks, and this sampler has 100 samples on 1");
      text = testing::usage_error([&] { load(larger, bytes); });
      test::expect_contains(text, "100 samples on 2 ranks, and this sampler has 120 samples on 2");
    }
  });
}

/// Sample i is the number i.
struct Indices : torch::data::Dataset<Indices> {
  explicit Indices(std::size_t n_samples) : n(n_samples) {}
  torch::data::Example<> get(std::size_t index) override {
    return {at::full({}, static_cast<std::int64_t>(index)), at::zeros({})};
  }
  c10::optional<std::size_t> size() const override { return n; }
  std::size_t n;
};

using Samples = std::vector<std::int64_t>;

/// It was loaded before the world in which the training goes on.
TEST(DistributedSamplerTest, a_position_of_a_former_world_is_for_as_many_ranks) {
  DistributedSampler begun(100), whole(100);
  on_ranks(2, [&](int rank) {
    DistributedSampler sampler(100);
    sampler.reset();
    const std::string between = saved(sampler);
    sampler.next(20);
    if (rank != 0) return;
    load(whole, between);
    load(begun, saved(sampler));
  });
  on_ranks(3, [&](int rank) {
    if (rank != 0) return;
    test::expect_contains(testing::usage_error([&] { begun.reset(); }),
                          "the epoch was loaded in the middle, on 2 ranks, and there are 3 now");
    whole.reset();
    EXPECT_EQ(n_left(whole), 34U);
  });
  on_ranks(2, [&](int rank) {
    if (rank != 0) return;
    begun.reset();
    EXPECT_EQ(n_left(begun), 30U);
  });
}

/// A loader that holds a copy of the sampler, as it is given by value.
auto loader_over(const DistributedSampler& sampler, std::size_t n_workers = 0) {
  return torch::data::make_data_loader(Indices(21).map(torch::data::transforms::Stack<>()), sampler,
                                       torch::data::DataLoaderOptions(3).workers(n_workers));
}

/// The samples of the first n_batches of a pass; no more are taken.
template <class Loader>
Samples pass(const Loader& loader, std::size_t n_batches) {
  Samples samples;
  for (const auto& batch : *loader) {
    for (std::int64_t i = 0; i < batch.data.numel(); ++i) {
      samples.push_back(batch.data[i].template item<std::int64_t>());
    }
    if (--n_batches == 0) break;
  }
  return samples;
}

TEST(DistributedSamplerTest, a_pass_of_a_loader_is_resumed_where_it_was_saved) {
  on_ranks(2, [](int /*rank*/) {
    DistributedSampler whole(21), sampler(21), other(21);
    const auto expected = loader_over(whole);
    const Samples epoch_0 = pass(expected, 100), epoch_1 = pass(expected, 100);
    EXPECT_NE(epoch_0, epoch_1);

    const auto loader = loader_over(sampler);
    Samples samples = pass(loader, 2);
    load(other, saved(sampler));
    const auto resumed = loader_over(other);
    for (const std::int64_t sample : pass(resumed, 100)) samples.push_back(sample);
    EXPECT_EQ(samples, epoch_0);
    EXPECT_EQ(pass(resumed, 100), epoch_1);
    EXPECT_EQ(pass(loader, 100), epoch_1) << "the saved one goes on with its next epoch";
  });
}

TEST(DistributedSamplerTest, copies_share_their_position) {
  DistributedSampler sampler(20), copy(sampler);
  copy.next(5);
  EXPECT_EQ(n_left(sampler), 15U);
  EXPECT_EQ(n_left(copy), 0U);
  copy.reset(10);
  EXPECT_EQ(sampler.n_samples(), 10U);
  EXPECT_EQ(n_left(sampler), 10U);
  DistributedSampler moved(std::move(copy));
  copy.reset();  // NOLINT: a loader may be given std::move(sampler), and sampler saved
  EXPECT_EQ(n_left(moved), 10U);
}

TEST(DistributedSamplerTest, another_epoch_is_begun_after_load_if_it_is_set) {
  DistributedSampler sampler(20), other(20);
  sampler.reset();
  sampler.next(5);
  const std::string bytes = saved(sampler);
  load(other, bytes);
  other.set_epoch(0);  // the epoch that was saved: the loop over epochs goes on in it
  other.reset();
  EXPECT_EQ(n_left(other), 15U);
  load(other, bytes);
  other.set_epoch(3);
  other.reset();
  EXPECT_EQ(n_left(other), 20U);
  load(other, bytes);
  other.reset(10);
  EXPECT_EQ(n_left(other), 10U);
}

TEST(DistributedSamplerTest, batches_that_workers_have_taken_ahead_are_not_skipped) {
  constexpr std::size_t kWorkers = 2;
  on_ranks(2, [](int /*rank*/) {
    DistributedSampler whole(21);
    const Samples epoch = pass(loader_over(whole), 100);
    for (std::size_t n_batches = 1; n_batches * 3 < epoch.size(); ++n_batches) {
      DistributedSampler sampler(21, {.n_ahead = 2 * kWorkers});
      const auto loader = loader_over(sampler, kWorkers);
      Samples samples = pass(loader, n_batches);
      EXPECT_EQ(samples.size(), n_batches * 3);
      DistributedSampler resumed(21, {.n_ahead = 2 * kWorkers});
      load(resumed, saved(sampler));
      for (const std::int64_t sample : pass(loader_over(resumed, kWorkers), 100)) {
        samples.push_back(sample);
      }
      EXPECT_EQ(samples, epoch) << n_batches;
    }
  });
}

}  // namespace distributed_sampler_test
}  // namespace lockstep::nn
