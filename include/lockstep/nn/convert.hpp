#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <source_location>
#include <utility>

#include <lockstep/group.hpp>

namespace torch::jit {
struct Module;
}

namespace lockstep::nn {

/// Replaces every torch::nn::BatchNorm1d/2d/3d in `module` by the SyncBatchNorm of the same
/// dimension over `group` (unset: see SyncBatchNormOptions). Returns `module`, or its replacement
/// if it is itself a BatchNorm.
///
/// Parameters and buffers remain the same tensors (existing optimizers keep working); options,
/// training flag and requires_grad are kept; a module in several places of the tree remains shared.
/// BatchNorms are replaced inside Sequential, ModuleList and ModuleDict and classes derived from
/// them, at any depth. A BatchNorm that is a typed member of your module (also of a class derived
/// from a container) cannot be replaced: UsageError names all such members, and nothing is
/// replaced. Declare such a member as a SyncBatchNorm, or use a SyncBatchNormScope,
/// which needs no conversion.
/// Every SyncBatchNorm in `module`, typed members too, is given the group, and for errors its name
/// in the module tree.
/// Not collective. Threads: not while the module is in use.
std::shared_ptr<torch::nn::Module> convert_sync_batchnorm(
    const std::shared_ptr<torch::nn::Module>& module, std::optional<Group> group = std::nullopt,
    std::source_location where = std::source_location::current());

/// The inverse: every SyncBatchNorm becomes the BatchNorm of its dimension, with the same rules.
/// Throws UsageError and replaces nothing if one is in training mode and has an option that
/// BatchNorm does not support: EpsMode::clamp, OnNonfinite::keep_running_stats. In eval mode
/// both compute the same.
std::shared_ptr<torch::nn::Module> revert_sync_batchnorm(
    const std::shared_ptr<torch::nn::Module>& module,
    std::source_location where = std::source_location::current());

template <class M>
std::shared_ptr<torch::nn::Module> convert_sync_batchnorm(
    const torch::nn::ModuleHolder<M>& module, std::optional<Group> group = std::nullopt,
    std::source_location where = std::source_location::current()) {
  return convert_sync_batchnorm(std::shared_ptr<torch::nn::Module>(module.ptr()), std::move(group),
                                where);
}

template <class M>
std::shared_ptr<torch::nn::Module> revert_sync_batchnorm(
    const torch::nn::ModuleHolder<M>& module,
    std::source_location where = std::source_location::current()) {
  return revert_sync_batchnorm(std::shared_ptr<torch::nn::Module>(module.ptr()), where);
}

/// Rejects a TorchScript module with one clear message.
template <std::same_as<torch::jit::Module> M, class... Args>
void convert_sync_batchnorm(const M& /*module*/, const Args&... /*args*/) {
  static_assert(sizeof...(Args) == static_cast<std::size_t>(-1),
                "lockstep: layers of a torch::jit::Module cannot be replaced: make a "
                "SyncBatchNormScope around its forward instead");
}
template <std::same_as<torch::jit::Module> M, class... Args>
void revert_sync_batchnorm(const M& module, const Args&... args) {
  convert_sync_batchnorm(module, args...);
}

}  // namespace lockstep::nn
