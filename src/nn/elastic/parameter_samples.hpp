#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace lockstep::nn {

/// Some values of each parameter, by which a change of all of them shows. Not their versions:
/// libtorch's optimizers write through Tensor::data(), which has a version of its own. On a device,
/// where reading them costs a synchronisation: none.
class ParameterSamples {
 public:
  void take(std::span<const at::Tensor> parameters);
  bool have_changed(std::span<const at::Tensor> parameters) const;

 private:
  std::vector<std::byte> bytes_;
};

/// The first parameter of the optimizer whose gradient, times the learning rate, is large enough to
/// have changed one of those values; undefined if there is none, or if a gradient is not finite.
at::Tensor find_large_gradient(const torch::optim::Optimizer& optimizer);

}  // namespace lockstep::nn
