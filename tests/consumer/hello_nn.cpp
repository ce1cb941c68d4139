#include <torch/nn/init.h>
#include <torch/types.h>

#include <cmath>
#include <cstdio>
#include <stdexcept>

#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>

namespace {

// Rank r's whole batch is r: only over all ranks is its mean what it must be.
bool normalise() {
  lockstep::nn::SyncBatchNorm1d norm(lockstep::nn::SyncBatchNormOptions(3).momentum(1.0));
  norm->forward(torch::full({2, 3}, static_cast<double>(lockstep::get_rank()),
                            torch::dtype(torch::kFloat32)));
  const double mean = norm->running_mean.mean().item<double>();
  if (lockstep::is_main_process()) {
    std::printf("%d ranks, running mean %g\n", lockstep::get_world_size(), mean);
  }
  return std::abs(mean - (lockstep::get_world_size() - 1) / 2.0) < 1e-6;
}

}  // namespace

// hello_nn: one rank, alone or of a launcher; hello_nn threads: three ranks of its own.
int main(int argc, char**) {
  if (argc > 1) {
    lockstep::run_ranks(3, [] {
      if (!normalise()) throw std::runtime_error("wrong mean");
    });
    return 0;
  }
  lockstep::init_dist();
  const bool right = normalise();
  lockstep::destroy_dist();
  return right ? 0 : 1;
}
