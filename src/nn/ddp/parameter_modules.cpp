#include <lockstep/nn/parameter_modules.hpp>

#include <fmt/format.h>

#include <lockstep/error.hpp>
#include <memory>

namespace lockstep::nn {
namespace {

constexpr const char* kOperation = "DistributedDataParallel";

/// A module whose children are made here.
struct Part : torch::nn::Module {};

/// Gives the tensor its name, as "layer.conv.weight" below the module.
void add(torch::nn::Module& module, const std::string& name, const at::Tensor& tensor,
         bool is_parameter) {
  if (!tensor.defined()) {
    throw UsageError({.operation = kOperation}, fmt::format("parameter {} is undefined", name));
  }
  torch::nn::Module* at = &module;
  std::size_t begin = 0;
  for (std::size_t dot; (dot = name.find('.', begin)) != std::string::npos; begin = dot + 1) {
    const std::string part = name.substr(begin, dot - begin);
    const auto children = at->named_children();
    const auto* const child = children.find(part);
    at =
        child != nullptr ? child->get() : at->register_module(part, std::make_shared<Part>()).get();
  }
  try {
    if (is_parameter) {
      at->register_parameter(name.substr(begin), tensor, tensor.requires_grad());
    } else {
      at->register_buffer(name.substr(begin), tensor);
    }
  } catch (const c10::Error& error) {
    throw UsageError({.operation = kOperation},
                     fmt::format("'{}' cannot be the name of a parameter: {}", name,
                                 error.what_without_backtrace()));
  }
}

}  // namespace

ParametersImpl::ParametersImpl(const std::vector<at::Tensor>& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    add(*this, std::to_string(i), parameters[i], /*is_parameter=*/true);
  }
}

ParametersImpl::ParametersImpl(const torch::OrderedDict<std::string, at::Tensor>& parameters) {
  for (const auto& item : parameters) add(*this, item.key(), item.value(), /*is_parameter=*/true);
}

ScriptModuleImpl::ScriptModuleImpl(torch::jit::Module script) : script_(std::move(script)) {
  for (const auto& parameter : script_.named_parameters()) {
    add(*this, parameter.name, parameter.value, /*is_parameter=*/true);
  }
  for (const auto& buffer : script_.named_buffers()) {
    add(*this, buffer.name, buffer.value, /*is_parameter=*/false);
  }
  if (script_.named_parameters().size() > 0) return;
  throw UsageError({.operation = kOperation},
                   "the TorchScript module has no parameters; torch.jit.freeze makes constants of "
                   "them: train the module that was frozen");
}

void ScriptModuleImpl::train(bool on) { script_.train(on); }

bool ScriptModuleImpl::is_training() const noexcept { return script_.is_training(); }

}  // namespace lockstep::nn
