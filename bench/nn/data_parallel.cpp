// DataParallel over CPU workers: a training step of a resnet18 with SyncBatchNorm on one replica
// and on two, and what replicate + scatter + gather (and the callbacks) take of it: `overhead` is
// the same step of a module that has all of the network's parameters and buffers and computes
// nothing. torch::nn::parallel::data_parallel is not here: it needs CUDA (docs/replicas.md).

#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <lockstep/nn.hpp>
#include <vector>

namespace {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: the modules by their names

constexpr std::int64_t kBatch = 16, kSize = 64, kClasses = 1000;

Sequential conv_bn(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
  return Sequential(
      Conv2d(Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false)),
      BatchNorm2d(out));
}

struct BlockImpl : Cloneable<BlockImpl> {
  BlockImpl(std::int64_t n_in, std::int64_t n_out, std::int64_t first_stride)
      : in(n_in), out(n_out), stride(first_stride) {
    BlockImpl::reset();
  }
  void reset() override {
    first = register_module("first", conv_bn(in, out, 3, stride));
    second = register_module("second", conv_bn(out, out, 3, 1));
    if (in != out) shortcut = register_module("shortcut", conv_bn(in, out, 1, stride));
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = second->forward(torch::relu(first->forward(x)));
    return torch::relu(y + (in != out ? shortcut->forward(x) : x));
  }
  std::int64_t in, out, stride;
  Sequential first{nullptr}, second{nullptr}, shortcut{nullptr};
};
TORCH_MODULE(Block);

Sequential resnet18() {
  Sequential net(Conv2d(Conv2dOptions(3, 64, 7).stride(2).padding(3).bias(false)), BatchNorm2d(64),
                 ReLU(), MaxPool2d(MaxPool2dOptions(3).stride(2).padding(1)), Block(64, 64, 1),
                 Block(64, 64, 1), Block(64, 128, 2), Block(128, 128, 1), Block(128, 256, 2),
                 Block(256, 256, 1), Block(256, 512, 2), Block(512, 512, 1), AdaptiveAvgPool2d(1),
                 Flatten(), Linear(512, kClasses));
  lockstep::nn::convert_sync_batchnorm(net);
  return net;
}

struct IdleImpl : Cloneable<IdleImpl> {
  IdleImpl() { IdleImpl::reset(); }
  void reset() override { net = register_module("net", resnet18()); }
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
  lockstep::nn::DataParallelWithCallback model(resnet18(), cpus(state.range(0)));
  run_steps(state, model, /*input_needs_gradient=*/false);
}
BENCHMARK(BM_resnet18_step)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);

void BM_overhead(benchmark::State& state) {
  lockstep::nn::DataParallelWithCallback model(Idle(), cpus(state.range(0)));
  run_steps(state, model, /*input_needs_gradient=*/true);
}
BENCHMARK(BM_overhead)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
