#include <lockstep/nn/parameter_modules.hpp>

#include <fmt/format.h>

#include <lockstep/error.hpp>
#include <memory>

#include "nn/ddp/call_site.hpp"

namespace lockstep::nn {
namespace {

using detail::kOperation;

/// A module whose children are made here.
struct Part : torch::nn::Module {};

/// A submodule of a script, with a mode of its own.
struct ScriptPart : torch::nn::Module {
  explicit ScriptPart(torch::jit::Module part) : script(std::move(part)) {}
  void train(bool on = true) override { script.train(on); }
  bool is_training() const noexcept override { return script.is_training(); }
  torch::jit::Module script;
};

/// Gives the tensor its name, as "layer.conv.weight" below the module.
void add_parameter(torch::nn::Module& module, const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    throw UsageError({.operation = kOperation}, fmt::format("parameter {} is undefined", name));
  }
  try {
    torch::nn::Module* at = &module;
    std::size_t begin = 0;
    for (std::size_t dot; (dot = name.find('.', begin)) != std::string::npos; begin = dot + 1) {
      const std::string part = name.substr(begin, dot - begin);
      const auto children = at->named_children();
      const auto* const child = children.find(part);
      at = child != nullptr ? child->get()
                            : at->register_module(part, std::make_shared<Part>()).get();
    }
    at->register_parameter(name.substr(begin), tensor, tensor.requires_grad());
  } catch (const c10::Error& error) {
    throw UsageError({.operation = kOperation},
                     fmt::format("'{}' cannot be the name of a parameter: {}", name,
                                 error.what_without_backtrace()));
  }
}

/// Registers what the script has: parameters, buffers and submodules.
void mirror(torch::nn::Module& module, const torch::jit::Module& script) {
  for (const auto& parameter : script.named_parameters(/*recurse=*/false)) {
    module.register_parameter(parameter.name, parameter.value, parameter.value.requires_grad());
  }
  for (const auto& buffer : script.named_buffers(/*recurse=*/false)) {
    module.register_buffer(buffer.name, buffer.value);
  }
  for (const auto& child : script.named_children()) {
    mirror(*module.register_module(child.name, std::make_shared<ScriptPart>(child.value)),
           child.value);
  }
}

void check_not_empty(std::size_t n) {
  if (n == 0) throw UsageError({.operation = kOperation}, "there are no parameters");
}

}  // namespace

ParametersImpl::ParametersImpl(const std::vector<at::Tensor>& parameters) {
  check_not_empty(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    add_parameter(*this, std::to_string(i), parameters[i]);
  }
}

ParametersImpl::ParametersImpl(const torch::OrderedDict<std::string, at::Tensor>& parameters) {
  check_not_empty(parameters.size());
  for (const auto& item : parameters) add_parameter(*this, item.key(), item.value());
}

ScriptModuleImpl::ScriptModuleImpl(torch::jit::Module script) : script_(std::move(script)) {
  mirror(*this, script_);
  if (script_.named_parameters().size() > 0) return;
  throw UsageError({.operation = kOperation},
                   "the TorchScript module has no parameters; torch.jit.freeze makes constants of "
                   "them: train the module that was frozen");
}

at::Tensor detail::tensor_of_output(const at::IValue& output) {
  if (output.isTensor()) return output.toTensor();
  throw UsageError({.operation = kOperation},
                   fmt::format("join cannot shadow a TorchScript module that returns a {}: give it "
                               "an example_forward",
                               output.tagKind()));
}

void ScriptModuleImpl::train(bool on) { script_.train(on); }

bool ScriptModuleImpl::is_training() const noexcept { return script_.is_training(); }

}  // namespace lockstep::nn
