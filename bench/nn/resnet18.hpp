#pragma once

#include <torch/torch.h>

#include <functional>
#include <utility>

/// ResNet-18 (He et al., 2015), as in torchvision: 11.7 million parameters with 1,000 classes, of
/// 64 channels in its first layers.
namespace lockstep::bench {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: the modules by their names

/// Adds modules between a convolution and its BatchNorm.
using Between = std::function<void(Sequential&)>;

inline Sequential conv_bn(std::int64_t in, std::int64_t out, std::int64_t kernel,
                          std::int64_t stride, const Between& add) {
  Sequential net(
      Conv2d(Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false)));
  if (add) add(net);
  net->push_back(BatchNorm2d(out));
  return net;
}

struct BlockImpl : Cloneable<BlockImpl> {
  BlockImpl(std::int64_t n_in, std::int64_t n_out, std::int64_t first_stride, Between between)
      : in(n_in), out(n_out), stride(first_stride), add(std::move(between)) {
    BlockImpl::reset();
  }
  void reset() override {
    first = register_module("first", conv_bn(in, out, 3, stride, add));
    second = register_module("second", conv_bn(out, out, 3, 1, add));
    if (in != out) shortcut = register_module("shortcut", conv_bn(in, out, 1, stride, add));
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = second->forward(torch::relu(first->forward(x)));
    return torch::relu(y + (in != out ? shortcut->forward(x) : x));
  }
  std::int64_t in, out, stride;
  Between add;
  Sequential first{nullptr}, second{nullptr}, shortcut{nullptr};
};
TORCH_MODULE(Block);

inline Sequential resnet18(std::int64_t n_classes, const Between& add = nullptr,
                           std::int64_t width = 64) {
  Sequential net = conv_bn(3, width, 7, 2, add);
  net->push_back(ReLU());
  net->push_back(MaxPool2d(MaxPool2dOptions(3).stride(2).padding(1)));
  std::int64_t in = width;
  for (const std::int64_t out : {width, 2 * width, 4 * width, 8 * width}) {
    net->push_back(Block(in, out, /*first_stride=*/out == in ? 1 : 2, add));
    net->push_back(Block(out, out, /*first_stride=*/1, add));
    in = out;
  }
  net->push_back(AdaptiveAvgPool2d(1));
  net->push_back(Flatten());
  net->push_back(Linear(in, n_classes));
  return net;
}

}  // namespace lockstep::bench
