#include "train/models.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cmath>

namespace train {
namespace {

namespace nn = torch::nn;

nn::Conv2d conv(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride = 1) {
  return nn::Conv2d(
      nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

/// Two convolutions with a skip connection.
struct ResidualBlockImpl : nn::Cloneable<ResidualBlockImpl> {
  ResidualBlockImpl(std::int64_t n_in, std::int64_t n_out, std::int64_t first_stride)
      : in(n_in), out(n_out), stride(first_stride) {
    ResidualBlockImpl::reset();
  }

  void reset() override {
    body = register_module(
        "body", nn::Sequential(conv(in, out, 3, stride), nn::BatchNorm2d(out), nn::ReLU(),
                               conv(out, out, 3), nn::BatchNorm2d(out)));
    if (stride == 1 && in == out) return;
    around = register_module(
        "around", nn::Sequential(conv(in, out, /*kernel=*/1, stride), nn::BatchNorm2d(out)));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    return torch::relu(body->forward(x) + (around.is_empty() ? x : around->forward(x)));
  }

  std::int64_t in, out, stride;
  nn::Sequential body{nullptr};
  nn::Sequential around{nullptr};
};
TORCH_MODULE(ResidualBlock);

nn::Sequential make_convnet(std::int64_t channels, std::int64_t n_classes) {
  nn::Sequential net;
  std::int64_t in = channels;
  for (const std::int64_t out : {16, 32, 64}) {
    net->push_back(conv(in, out, 3, /*stride=*/2));
    net->push_back(nn::BatchNorm2d(out));
    net->push_back(nn::ReLU());
    in = out;
  }
  net->push_back(nn::AdaptiveAvgPool2d(1));
  net->push_back(nn::Flatten());
  net->push_back(nn::Linear(in, n_classes));
  return net;
}

nn::Sequential make_resnet18(std::int64_t channels, std::int64_t n_classes) {
  nn::Sequential net(conv(channels, 64, 3), nn::BatchNorm2d(64), nn::ReLU());
  std::int64_t in = 64;
  for (const std::int64_t out : {64, 128, 256, 512}) {
    net->push_back(ResidualBlock(in, out, /*stride=*/out == in ? 1 : 2));
    net->push_back(ResidualBlock(out, out, /*stride=*/1));
    in = out;
  }
  net->push_back(nn::AdaptiveAvgPool2d(1));
  net->push_back(nn::Flatten());
  net->push_back(nn::Linear(in, n_classes));
  return net;
}

}  // namespace

nn::Sequential make_model(Model model, std::size_t channels, std::size_t n_classes) {
  const auto in = static_cast<std::int64_t>(channels);
  const auto out = static_cast<std::int64_t>(n_classes);
  switch (model) {
    case Model::convnet: return make_convnet(in, out);
    case Model::resnet18: return make_resnet18(in, out);
  }
  TORCH_CHECK(false, "no such model");
}

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

}  // namespace train
