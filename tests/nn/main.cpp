#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string_view>

#include "device_ranks.hpp"

/// libtorch computes on one thread: the ranks are threads enough, and tests fork ranks, which a
/// thread pool would not survive.
int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc == 4 && std::string_view(argv[1]) == "device_ranks") {
    return lockstep::nn::device_ranks::run(argv[2], argv[3]);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
