#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <sstream>
#include <string>
#include <type_traits>

namespace lockstep::nn {

/// Optimizer::state(), as its type depends on the libtorch version: the key is a string or a
/// pointer.
using OptimizerStates =
    std::remove_cvref_t<decltype(std::declval<torch::optim::Optimizer&>().state())>;

template <class Key = OptimizerStates::key_type>
Key key_of_state(const at::Tensor& parameter) {
  if constexpr (std::is_same_v<Key, std::string>) {
    std::ostringstream key;
    key << static_cast<const void*>(parameter.unsafeGetTensorImpl());
    return key.str();
  } else {
    return parameter.unsafeGetTensorImpl();
  }
}

/// Null if there is none.
inline const torch::optim::OptimizerParamState* find_state(const OptimizerStates& states,
                                                           const at::Tensor& parameter) {
  const auto state = states.find(key_of_state(parameter));
  return state == states.end() ? nullptr : state->second.get();
}

}  // namespace lockstep::nn
