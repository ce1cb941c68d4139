#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <cstdint>
#include <string>

namespace train {

/// Maps grey images (n, 1, height, width) to scores (n, n_classes). "convnet": three convolutions;
/// "resnet18": the variant for small images (first convolution 3x3, no pooling after it). Every
/// BatchNorm2d is in a Sequential, where convert_sync_batchnorm can replace it. The weights are a
/// function of the seed (He et al. 2015, normal, fan in).
torch::nn::Sequential make_model(const std::string& name, std::int64_t n_classes,
                                 torch::Dtype dtype, std::uint64_t seed);

}  // namespace train
