#include "nn/ddp/same_module.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <lockstep/objects.hpp>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "nn/elements/elements.hpp"

namespace lockstep::nn::detail {

std::unordered_set<const void*> sparse_parameters(const torch::nn::Module& module) {
  std::unordered_set<const void*> found;
  const auto add_of = [&]<class Layer>(const torch::nn::Module& one, const Layer*) {
    const auto* const layer = dynamic_cast<const Layer*>(&one);
    if (layer != nullptr && layer->options.sparse() && layer->weight.defined()) {
      found.insert(layer->weight.unsafeGetTensorImpl());
    }
  };
  for (const auto& one : module.modules()) {
    add_of(*one, static_cast<torch::nn::EmbeddingImpl*>(nullptr));
    add_of(*one, static_cast<torch::nn::EmbeddingBagImpl*>(nullptr));
  }
  return found;
}

namespace {

/// The order of the elements of a gradient in its bucket, unless it is contiguous.
std::string describe_strides(const at::Tensor& parameter) {
  if (parameter.is_contiguous()) return {};
  const at::Tensor like = at::empty_like(parameter);
  return like.is_contiguous() ? "" : c10::str(" with strides ", like.strides());
}

/// One line per parameter and buffer: what must agree on all ranks.
std::vector<std::string> describe(const torch::nn::Module& module) {
  std::vector<std::string> lines;
  const auto sparse = sparse_parameters(module);
  std::map<const void*, std::string> names;  // the first of each tensor
  for (const auto& item : module.named_parameters()) {
    const auto [first, is_first] = names.emplace(item->unsafeGetTensorImpl(), item.key());
    lines.push_back(fmt::format("parameter {} {} {}{}{}{}", item.key(),
                                c10::toString(item->scalar_type()), c10::str(item->sizes()),
                                item->requires_grad() ? describe_strides(*item) : " frozen",
                                sparse.contains(item->unsafeGetTensorImpl()) ? " sparse" : "",
                                is_first ? "" : ", the same tensor as " + first->second));
  }
  for (const auto& item : module.named_buffers()) {
    lines.push_back(fmt::format("buffer {} {} {}", item.key(), c10::toString(item->scalar_type()),
                                c10::str(item->sizes())));
  }
  return lines;
}

/// Throws the same MismatchError on every rank, naming the first difference from rank 0.
void check_same_module(const torch::nn::Module& module, const Group& group,
                       const ErrorContext& context) {
  const auto modules = all_gather_object(describe(module), group, Timeout(), context.where);
  for (std::size_t rank = 1; rank < modules.size(); ++rank) {
    if (modules[rank] == modules[0]) continue;
    auto expected = modules[0], got = modules[rank];
    const std::size_t n_lines = std::max(expected.size(), got.size());
    expected.resize(n_lines, "nothing more");
    got.resize(n_lines, "nothing more");
    const auto first = std::mismatch(expected.begin(), expected.end(), got.begin());
    throw MismatchError(context,
                        fmt::format("the ranks' modules differ, first here: rank 0 has {}, rank {} "
                                    "has {}: build the same module on every rank",
                                    *first.first, rank, *first.second));
  }
}

/// Autograd has one thread per device; hooks of one module would run on several threads.
void check_one_device(const torch::nn::Module& module, const ErrorContext& context) {
  const std::string* first = nullptr;
  std::optional<at::Device> device;
  const auto parameters = module.named_parameters();
  for (const auto& item : parameters) {
    if (!item->requires_grad()) continue;
    if (!device.has_value()) {
      first = &item.key();
      device = item->device();
    }
    if (item->device() == *device) continue;
    throw UsageError(context,
                     fmt::format("parameter {} is on {}, {} on {}: move the module to one device",
                                 *first, device->str(), item.key(), item->device().str()));
  }
}

/// Throws UsageError for a tensor that cannot be sent, before anything is sent.
void check_tensors(const torch::nn::Module& module, const ErrorContext& context) {
  const auto check = [&context](const char* kind, const std::string& name,
                                const at::Tensor& tensor) {
    const at::ScalarType part = c10::toRealValueType(tensor.scalar_type());
    if (tensor.requires_grad() && !dtype_of(part)) {
      throw UsageError(context, fmt::format("{} {} is of type {}, whose gradients cannot be "
                                            "averaged: convert it with to(), or freeze it",
                                            kind, name, c10::toString(tensor.scalar_type())));
    }
    if (tensor.requires_grad() && !tensor.is_leaf()) {
      throw UsageError(context, fmt::format("{} {} is the result of an operation, which gets no "
                                            "gradient of its own: pass what it was computed from",
                                            kind, name));
    }
    if ((tensor.is_cpu() || tensor.is_cuda()) && tensor.layout() == at::kStrided &&
        !tensor.is_quantized()) {
      return;
    }
    throw UsageError(context, fmt::format("{} {} is a {}: make it a dense tensor, not quantized, "
                                          "on a CPU or CUDA device",
                                          kind, name, tensor.toString()));
  };
  for (const auto& item : module.named_parameters()) check("parameter", item.key(), *item);
  for (const auto& item : module.named_buffers()) check("buffer", item.key(), *item);
}

}  // namespace

void check_module(const torch::nn::Module& module, const Group& group,
                  const ErrorContext& context) {
  check_one_device(module, context);
  check_tensors(module, context);
  check_same_module(module, group, context);
}

}  // namespace lockstep::nn::detail
