#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

#include <string>
#include <utility>
#include <vector>

/// Modules for what is none: DistributedDataParallel makes them of what it is given.
namespace lockstep::nn {

/// Parameters without a module. They keep their names, also those with dots; those of a vector are
/// "0", "1", ...
class ParametersImpl : public torch::nn::Module {
 public:
  /// Throws UsageError if there are none, for an undefined tensor, and for a name with an empty
  /// part
  /// ("a..b").
  explicit ParametersImpl(const std::vector<at::Tensor>& parameters);
  explicit ParametersImpl(const torch::OrderedDict<std::string, at::Tensor>& parameters);
};
TORCH_MODULE(Parameters);

/// A TorchScript module, which shares its parameters and buffers with this one. A parameter that is
/// replaced later (setattr) is not seen; Module::to and load change the same tensors.
class ScriptModuleImpl : public torch::nn::Module {
 public:
  /// Throws UsageError if it has no parameters, as after torch.jit.freeze.
  explicit ScriptModuleImpl(torch::jit::Module script);
  /// The script's forward: ddp(images).toTensor().
  template <class... Args>
  at::IValue forward(Args&&... args) {
    return script_.forward({at::IValue(std::forward<Args>(args))...});
  }
  void train(bool on = true) override;
  bool is_training() const noexcept override;
  torch::jit::Module& script() { return script_; }

 private:
  torch::jit::Module script_;
};
TORCH_MODULE(ScriptModule);

namespace detail {
/// Throws UsageError if it is something else.
at::Tensor tensor_of_output(const at::IValue& output);
}  // namespace detail

}  // namespace lockstep::nn
