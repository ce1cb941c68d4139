#include "nn/replicas/module_copies.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules.h>

#include <algorithm>
#include <cstring>
#include <lockstep/nn/sync_batch_norm.hpp>
#include <map>
#include <mutex>
#include <typeinfo>

namespace lockstep::nn::detail {
namespace {

using at::Tensor;
using torch::nn::Module;
namespace autograd = torch::autograd::impl;

/// A copy's parameters and buffers share the module's memory. For devices autograd continues from
/// the copy to the original's gradients, as in torch::nn::parallel::replicate; the shared version
/// counter detects an optimizer step between forward and backward.
void link(const Tensor& copy, const Tensor& original, const at::Device& device,
          ModuleCopies::Of of) {
  const at::AutoGradMode with_gradients(true);  // for the copy back from another device
  const Tensor source = original.device() == device ? original : original.to(device);
  autograd::set_gradient_edge(copy, {});
  copy.set_requires_grad(false);
  copy.set_data(source);
  autograd::set_version_counter(copy, autograd::version_counter(source));
  if (of == ModuleCopies::Of::shards) {
    copy.set_requires_grad(original.requires_grad());
  } else if (original.requires_grad()) {
    autograd::set_gradient_edge(copy, autograd::gradient_edge(source));
  }
}

/// -0 is not 0, and a NaN is itself; of other devices only the values are looked at.
bool have_same_bits(const Tensor& a, const Tensor& b) {
  if (!a.is_cpu() || !a.is_contiguous() || !b.is_contiguous()) return a.equal(b);
  return a.nbytes() == 0 || std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

/// Copies other than the first have buffers of their own: two writers of one would race.
void renew_buffer(const Tensor& mine, const Tensor& original, const at::Device& device) {
  if (mine.sizes() == original.sizes() && mine.scalar_type() == original.scalar_type() &&
      mine.device() == device) {
    // Only if it changed: an earlier forward's graph may need its current value.
    const Tensor source = original.to(device);
    if (!have_same_bits(mine, source)) mine.copy_(source);
  } else {
    mine.set_data(original.detach().to(device, original.scalar_type(), /*non_blocking=*/false,
                                       /*copy=*/true));
  }
}

/// Adds the tensors of a Layer, or of a class derived from it; false for other modules.
template <class Layer>
bool add_members(Module& module, std::vector<Tensor*>& members) {
  auto* const layer = dynamic_cast<Layer*>(&module);
  if (layer == nullptr) return false;
  if constexpr (requires { layer->in_proj_weight; }) {
    members.insert(members.end(),
                   {&layer->in_proj_weight, &layer->in_proj_bias, &layer->bias_k, &layer->bias_v,
                    &layer->q_proj_weight, &layer->k_proj_weight, &layer->v_proj_weight});
  } else if constexpr (requires { layer->weight_ih; }) {
    members.insert(members.end(),
                   {&layer->weight_ih, &layer->weight_hh, &layer->bias_ih, &layer->bias_hh});
  } else {
    members.push_back(&layer->weight);
    if constexpr (requires { layer->bias; }) members.push_back(&layer->bias);
  }
  return true;
}

template <class... Layers>
void add_members_of_any(Module& module, std::vector<Tensor*>& members) {
  (void)(add_members<Layers>(module, members) || ...);
}

/// The tensor members of torch's layers and of ours, in the order of `modules`. Without those of
/// RNN, LSTM and GRU, which do not expose them.
std::vector<Tensor*> members_of(const std::vector<std::shared_ptr<Module>>& modules) {
  using namespace torch::nn;  // NOLINT: the layers by their names
  std::vector<Tensor*> members;
  for (const auto& module : modules) {
    add_members_of_any<LinearImpl, BilinearImpl, EmbeddingImpl, EmbeddingBagImpl, Conv1dImpl,
                       Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl, ConvTranspose2dImpl,
                       ConvTranspose3dImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl,
                       SyncBatchNorm1dImpl, SyncBatchNorm2dImpl, SyncBatchNorm3dImpl,
                       InstanceNorm1dImpl, InstanceNorm2dImpl, InstanceNorm3dImpl, LayerNormImpl,
                       GroupNormImpl, PReLUImpl, MultiheadAttentionImpl, RNNCellImpl, LSTMCellImpl,
                       GRUCellImpl>(*module, members);
  }
  return members;
}

std::string type_of(const Module& module) { return c10::demangle(typeid(module).name()); }

}  // namespace

void ModuleCopies::prepare(std::size_t n) {
  // Copies must support training, whatever mode the caller is in.
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  const auto modules = module_->modules();
  const auto identities = [](const std::vector<Tensor>& tensors) {
    return std::vector<Identity>(tensors.begin(), tensors.end());
  };
  const auto parameters = identities(module_->parameters());
  const auto buffers = identities(module_->buffers());
  if (modules != modules_ || parameters.size() != parameters_.size() ||
      buffers.size() != buffers_.size()) {
    copies_.clear();
  }
  if (modules != modules_) members_ = members_of(modules);
  // If this throws: the next call makes others, but shards belong to a Reducer each.
  auto drop = c10::make_scope_exit([this] {
    if (of_ == Of::devices) copies_.clear();
  });
  const std::size_t n_linked = copies_.size();
  while (copies_.size() < n) copies_.push_back(make_copy(modules, parameters, buffers));
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    const Copy& copy = copies_[i];
    const at::Device device = of_ == Of::shards ? at::Device(at::kCPU) : devices_[i];
    const bool elsewhere = !device.is_cpu() && i != 0;  // its copies are valid for one call
    const auto refresh = [&](const Tensor& mine, std::size_t k, const auto& now,
                             const auto& before) {
      if (i >= n_linked || elsewhere || now[k] != before[k]) {
        link(mine, now[k].tensor, device, of_);
      }
    };
    for (std::size_t k = 0; k < parameters.size(); ++k) {
      refresh(copy.parameters[k], k, parameters, parameters_);
    }
    for (std::size_t k = 0; k < buffers.size(); ++k) {
      if (i == 0 && of_ == Of::devices) {
        refresh(copy.buffers[k], k, buffers, buffers_);
      } else {
        renew_buffer(copy.buffers[k], buffers[k].tensor, device);
      }
    }
    tie_members(copy, parameters, buffers, device);
    for (std::size_t k = 0; k < modules.size(); ++k) {
      const bool training = modules[k]->is_training();
      if (copy.modules[k]->is_training() != training) copy.modules[k]->train(training);
    }
  }
  modules_ = modules;
  parameters_ = parameters;
  buffers_ = buffers;
  drop.release();
}

/// clone() gives each layer of a copy the value of the parameter that the original has registered,
/// not of the tensor with which it computes.
void ModuleCopies::tie_members(const Copy& copy, const std::vector<Identity>& parameters,
                               const std::vector<Identity>& buffers,
                               const at::Device& device) const {
  std::map<const void*, const Tensor*> registered;
  const auto add = [&registered](const auto& originals, const std::vector<Tensor>& mine) {
    for (std::size_t k = 0; k < mine.size(); ++k) {
      registered.emplace(originals[k].tensor.unsafeGetTensorImpl(), &mine[k]);
    }
  };
  add(parameters, copy.parameters);
  add(buffers, copy.buffers);
  for (std::size_t k = 0; k < members_.size(); ++k) {
    const Tensor& original = *members_[k];
    const auto place = registered.find(original.unsafeGetTensorImpl());
    if (place != registered.end()) {
      *copy.members[k] = *place->second;
    } else if (!original.defined() || original.device() == device) {
      *copy.members[k] = original;
    } else {
      throw error(
          fmt::format("a layer's member has been set to a tensor on {} that no module has "
                      "registered, and there are copies on {}: register it",
                      original.device().str(), device.str()));
    }
  }
}

/// torch clones a class derived from its containers as the container, or as null.
void ModuleCopies::check_copy(const Module& original, const ModulePtr& copy,
                              const std::string& name) const {
  if (!copy || typeid(*copy) != typeid(original)) {
    throw error(fmt::format(
        "cannot copy the module: the clone of {} is {}; a class derived from "
        "{} needs a clone() "
        "of its own that returns its type",
        name.empty() ? "the module itself, a " + type_of(original)
                     : "'" + name + "', a " + type_of(original) + ",",
        copy ? "a " + type_of(*copy) : "null", copy ? type_of(*copy) : "a container of torch's"));
  }
  const auto expected = original.named_children();
  const auto got = copy->named_children();
  // Sequential renumbers its modules; make_copy reports other differences.
  for (std::size_t i = 0; i < std::min(expected.size(), got.size()); ++i) {
    const std::string& key = expected[i].key();
    check_copy(*expected[i].value(), got[i].value(), name.empty() ? key : name + "." + key);
  }
}

ModuleCopies::Copy ModuleCopies::make_copy(const std::vector<ModulePtr>& modules,
                                           const std::vector<Identity>& parameters,
                                           const std::vector<Identity>& buffers) const {
  Copy copy;
  // clone() draws initial values only to overwrite them: keep the random numbers that training
  // would otherwise draw.
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const Tensor state = [&] {
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  }();
  const auto keep_random_numbers = c10::make_scope_exit([&] {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  });
  try {
    copy.module = module_->clone();
  } catch (const c10::Error& why) {
    throw error(fmt::format("cannot copy the module: {}", why.what_without_backtrace()));
  }
  check_copy(*module_, copy.module, "");
  copy.modules = copy.module->modules();
  copy.parameters = copy.module->parameters();
  copy.buffers = copy.module->buffers();
  copy.members = members_of(copy.modules);
  if (copy.modules.size() != modules.size() || copy.parameters.size() != parameters.size() ||
      copy.buffers.size() != buffers.size()) {
    throw error(
        fmt::format("the module's clone() has {} modules, {} parameters and {} buffers; the module "
                    "has {}, {} and {}: its reset() must create all of them, and tensors must be "
                    "registered",
                    copy.modules.size(), copy.parameters.size(), copy.buffers.size(),
                    modules.size(), parameters.size(), buffers.size()));
  }
  return copy;
}

}  // namespace lockstep::nn::detail
