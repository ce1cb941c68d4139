// Positions in an epoch that another rank, or another number of ranks, loads.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/nn.hpp>

#include <algorithm>
#include <lockstep/objects.hpp>
#include <sstream>
#include <string>

#include "helpers.hpp"

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
      EXPECT_NE(text.find("100 samples on 2 ranks, and this sampler has 100 samples on 1"),
                std::string::npos)
          << text;
      text = testing::usage_error([&] { load(larger, bytes); });
      EXPECT_NE(text.find("100 samples on 2 ranks, and this sampler has 120 samples on 2"),
                std::string::npos)
          << text;
    }
  });
}

}  // namespace distributed_sampler_test
}  // namespace lockstep::nn
