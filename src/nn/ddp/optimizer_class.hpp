#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <lockstep/nn/zero_redundancy_optimizer.hpp>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep::nn::detail {

/// Of a parameter or a piece of one: the tensors in the order of the class, undefined where it has
/// none.
struct ElementState {
  std::int64_t step = 0;
  std::vector<at::Tensor> tensors;
};

/// A class of elementwise optimizers, type-erased.
struct OptimizerClass {
  std::unique_ptr<torch::optim::Optimizer> (*make)(std::vector<at::Tensor> parameters,
                                                   const torch::optim::OptimizerOptions& defaults);
  std::optional<ElementState> (*state_of)(const torch::optim::Optimizer&, const at::Tensor&);
  void (*set_state)(torch::optim::Optimizer&, const at::Tensor&, const ElementState&);
  std::vector<std::pair<const char*, double>> (*values)(const torch::optim::OptimizerOptions&);
};

}  // namespace lockstep::nn::detail
