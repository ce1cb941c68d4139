// DataParallel on CPU workers: a training step of a resnet18 with SyncBatchNorm on one replica and
// on two, and the cost of replicate + scatter + gather (and the callbacks): `overhead` is the same
// step of a module that has all of the network's parameters and buffers and computes nothing.
// torch::nn::parallel::data_parallel is not measured: it needs CUDA (docs/replicas.md).

#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <lockstep/nn.hpp>
#include <vector>

#include "resnet18.hpp"

namespace {

using namespace lockstep::bench;

constexpr std::int64_t kBatch = 16, kSize = 64, kClasses = 1000;

Sequential synchronised() {
  Sequential net = resnet18(kClasses);
  lockstep::nn::convert_sync_batchnorm(net);
  return net;
}

struct IdleImpl : Cloneable<IdleImpl> {
  IdleImpl() { IdleImpl::reset(); }
  void reset() override { net = register_module("net", synchronised()); }
  Tensor forward(const Tensor& x) { return x.flatten(1).narrow(1, 0, kClasses); }
  Sequential net{nullptr};
};
TORCH_MODULE(Idle);

template <class Model>
void run_steps(benchmark::State& state, Model& model, bool input_needs_gradient) {
  const Tensor x = torch::rand({kBatch, 3, kSize, kSize}).requires_grad_(input_needs_gradient);
  const Tensor labels = torch::randint(kClasses, {kBatch});
  const auto step = [&] { torch::cross_entropy_loss(model(x), labels).backward(); };
  step();
  for ([[maybe_unused]] auto _ : state) step();
}

std::vector<at::Device> cpus(std::int64_t n) {
  return std::vector<at::Device>(static_cast<std::size_t>(n), at::kCPU);
}

void BM_resnet18_step(benchmark::State& state) {
  lockstep::nn::DataParallelWithCallback model(synchronised(), cpus(state.range(0)));
  run_steps(state, model, /*input_needs_gradient=*/false);
}
BENCHMARK(BM_resnet18_step)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);

void BM_overhead(benchmark::State& state) {
  lockstep::nn::DataParallelWithCallback model(Idle(), cpus(state.range(0)));
  run_steps(state, model, /*input_needs_gradient=*/true);
}
BENCHMARK(BM_overhead)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
