#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>

#include "train/data.hpp"
#include "train/options.hpp"

namespace train {

/// Maps images (n, channels, height, width) to scores (n, n_classes). Every BatchNorm2d is in a
/// Sequential, where convert_sync_batchnorm can replace it.
/// convnet: three convolutions of 16, 32, 64 channels. resnet18: the variant for small images (He
/// et al. 2015, first convolution 3x3, no pooling after it).
torch::nn::Sequential make_model(Model model, std::size_t channels, std::size_t n_classes);

/// Draws the weights (He et al. 2015, normal, fan in) from a local generator, because the global
/// one is shared by the threads of run_ranks; the biases are 0.
void initialise(torch::nn::Module& model, std::uint64_t seed);

}  // namespace train
