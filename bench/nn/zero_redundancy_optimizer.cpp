// A training step of a resnet18 with DistributedDataParallel, batch 8 and one thread on each rank
// of `lockstep run -n N -- bench_zero_redundancy_optimizer [IMAGE_SIZE [SECONDS]]`, with plain
// optimizers and with ZeroRedundancyOptimizer. Both alternate. Per row, on rank 0: the medians of
// the whole step and of Optimizer::step, the median of the ratios of the whole step to the plain
// one's of the same round, and the bytes of the optimizer's state. One rank pays no communication.

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "rank.hpp"
#include "resnet18.hpp"

namespace {

using namespace lockstep::bench;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kBatch = 8, kClasses = 1000;
constexpr std::size_t kMinRounds = 5;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// One network and its optimizer.
struct Candidate {
  template <class Optimizer, class Options>
  Candidate(const Optimizer* /*class*/, const Options& options) {
    torch::manual_seed(1);
    net = resnet18(kClasses);
    ddp = std::make_unique<lockstep::nn::DistributedDataParallel<Sequential>>(net);
    optimizer = std::make_unique<Optimizer>(net->parameters(), options);
  }

  void step(const Tensor& x, const Tensor& labels) {
    for (const Tensor& parameter : net->parameters()) {
      if (parameter.mutable_grad().defined()) parameter.mutable_grad().zero_();
    }
    lockstep::barrier();
    const auto begin = Clock::now();
    torch::cross_entropy_loss((*ddp)(x), labels).backward();
    const auto backward_end = Clock::now();
    optimizer->step();
    lockstep::barrier();
    update_ms.push_back(ms_since(backward_end));
    step_ms.push_back(ms_since(begin));
  }

  Sequential net{nullptr};
  std::unique_ptr<lockstep::nn::DistributedDataParallel<Sequential>> ddp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<double> step_ms, update_ms;
};

template <class Plain, class Options>
void compare(const std::string& name, std::int64_t size, double seconds, const Options& options) {
  using Sharded = lockstep::nn::ZeroRedundancyOptimizer<Plain>;
  Candidate plain(static_cast<const Plain*>(nullptr), options);
  Candidate sharded(static_cast<const Sharded*>(nullptr), options);
  torch::manual_seed(2 + lockstep::get_rank());
  const Tensor x = torch::rand({kBatch, 3, size, size});
  const Tensor labels = torch::randint(kClasses, {kBatch});
  const std::array both{&plain, &sharded};
  for (Candidate* one : both) {  // afterwards the buckets are rebuilt and there is a state
    one->step(x, labels);
    one->step_ms.clear();
    one->update_ms.clear();
  }
  const auto begin = Clock::now();
  for (bool goes_on = true; goes_on; lockstep::broadcast_object(goes_on)) {
    const std::size_t first = plain.step_ms.size() % 2;
    both[first]->step(x, labels);
    both[1 - first]->step(x, labels);
    goes_on = ms_since(begin) < 1000 * seconds || plain.step_ms.size() < kMinRounds;
  }
  const auto expected = plain.net->parameters(), got = sharded.net->parameters();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (!expected[i].equal(got[i])) throw std::runtime_error("the optimizers' results differ");
  }
  const auto bytes =
      lockstep::all_gather_object(dynamic_cast<const Sharded&>(*sharded.optimizer).n_state_bytes());
  if (!lockstep::is_main_process()) return;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < plain.step_ms.size(); ++i) {
    ratios.push_back(sharded.step_ms[i] / plain.step_ms[i]);
  }
  fmt::print(
      "{:<10} {:>7} rounds, ms: plain {:>7.1f}, of it the update {:>6.1f}; sharded {:>7.1f}, "
      "{:>6.1f}; ratio {:.3f}; bytes of state {}\n",
      name, ratios.size(), median(plain.step_ms), median(plain.update_ms), median(sharded.step_ms),
      median(sharded.update_ms), median(ratios), fmt::join(bytes, " "));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  init_rank();
  const std::int64_t size = argc > 1 ? std::atoi(argv[1]) : 64;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 30;
  if (lockstep::is_main_process()) {
    fmt::print("resnet18, {} ranks, batch {}, {}x{}, libtorch {}\n", lockstep::get_world_size(),
               kBatch, size, size, TORCH_VERSION);
  }
  compare<torch::optim::SGD>("SGD", size, seconds, torch::optim::SGDOptions(1e-3).momentum(0.9));
  compare<torch::optim::Adam>("Adam", size, seconds, torch::optim::AdamOptions(1e-4));
  lockstep::destroy_dist();
  return 0;
}
