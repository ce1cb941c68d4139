#pragma once

#include <torch/torch.h>

/// ResNet-18 (He et al., 2015), as in torchvision: 11.7 million parameters with 1,000 classes.
namespace lockstep::bench {

using torch::Tensor;
using namespace torch::nn;  // NOLINT: the modules by their names

inline Sequential conv_bn(std::int64_t in, std::int64_t out, std::int64_t kernel,
                          std::int64_t stride) {
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

inline Sequential resnet18(std::int64_t n_classes) {
  Sequential net(Conv2d(Conv2dOptions(3, 64, 7).stride(2).padding(3).bias(false)), BatchNorm2d(64),
                 ReLU(), MaxPool2d(MaxPool2dOptions(3).stride(2).padding(1)), Block(64, 64, 1),
                 Block(64, 64, 1), Block(64, 128, 2), Block(128, 128, 1), Block(128, 256, 2),
                 Block(256, 256, 1), Block(256, 512, 2), Block(512, 512, 1), AdaptiveAvgPool2d(1),
                 Flatten(), Linear(512, n_classes));
  return net;
}

}  // namespace lockstep::bench
