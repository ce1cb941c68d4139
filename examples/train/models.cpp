#include "models.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cmath>

namespace train {
namespace {

namespace nn = torch::nn;

/// Ends with a BatchNorm.
void add_conv(nn::Sequential& net, std::int64_t in, std::int64_t out, std::int64_t kernel,
              std::int64_t stride = 1) {
  net->push_back(nn::Conv2d(
      nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false)));
  net->push_back(nn::BatchNorm2d(out));
}

/// Two convolutions with a skip connection.
struct ResidualBlockImpl : nn::Cloneable<ResidualBlockImpl> {
  ResidualBlockImpl(std::int64_t n_in, std::int64_t n_out, std::int64_t first_stride)
      : in(n_in), out(n_out), stride(first_stride) {
    ResidualBlockImpl::reset();
  }

  void reset() override {
    body = register_module("body", nn::Sequential());
    add_conv(body, in, out, /*kernel=*/3, stride);
    body->push_back(nn::ReLU());
    add_conv(body, out, out, /*kernel=*/3);
    if (stride == 1 && in == out) return;
    around = register_module("around", nn::Sequential());
    add_conv(around, in, out, /*kernel=*/1, stride);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    return torch::relu(body->forward(x) + (around.is_empty() ? x : around->forward(x)));
  }

  std::int64_t in, out, stride;
  nn::Sequential body{nullptr};
  nn::Sequential around{nullptr};
};
TORCH_MODULE(ResidualBlock);

/// Draws from a generator of its own, because the global one is shared by the threads of a process.
void initialise(nn::Module& model, std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  const at::Generator random = at::detail::createCPUGenerator(seed);
  for (torch::Tensor& parameter : model.parameters()) {
    if (parameter.dim() < 2) continue;
    const double fan_in = static_cast<double>(parameter.numel() / parameter.size(0));
    // Drawn in f64 for both precisions, so f32 and f64 start from the same network.
    const torch::Tensor drawn = torch::empty(parameter.sizes(), torch::kFloat64);
    parameter.copy_(drawn.normal_(0.0, std::sqrt(2.0 / fan_in), random));
  }
  for (const auto& module : model.modules()) {  // BatchNorm draws nothing, Linear its bias
    if (const auto* linear = module->as<nn::Linear>()) linear->bias.zero_();
  }
}

}  // namespace

nn::Sequential make_model(const std::string& name, std::int64_t n_classes, torch::Dtype dtype,
                          std::uint64_t seed) {
  nn::Sequential net;
  std::int64_t in = 1;
  if (name == "resnet18") {
    in = 64;
    add_conv(net, 1, in, /*kernel=*/3);
    net->push_back(nn::ReLU());
    for (const std::int64_t out : {64, 128, 256, 512}) {
      net->push_back(ResidualBlock(in, out, /*stride=*/out == in ? 1 : 2));
      net->push_back(ResidualBlock(out, out, /*stride=*/1));
      in = out;
    }
  } else {
    for (const std::int64_t out : {16, 32, 64}) {
      add_conv(net, in, out, /*kernel=*/3, /*stride=*/2);
      net->push_back(nn::ReLU());
      in = out;
    }
  }
  net->push_back(nn::AdaptiveAvgPool2d(1));
  net->push_back(nn::Flatten());
  net->push_back(nn::Linear(in, n_classes));
  net->to(dtype);
  initialise(*net, seed);
  return net;
}

}  // namespace train
