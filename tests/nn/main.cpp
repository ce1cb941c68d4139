#include <gtest/gtest.h>
#include <torch/torch.h>

/// libtorch computes on one thread: the ranks are threads enough, and tests fork ranks, which a
/// thread pool would not survive.
int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
