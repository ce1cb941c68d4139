#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <source_location>

#include <lockstep/detail/arguments.hpp>
#include <lockstep/group.hpp>
#include <lockstep/world.hpp>

namespace lockstep::nn {

namespace detail {
void assert_in_sync(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
                    const Group& group, std::source_location where);

/// A module, a ModuleHolder or pointer to one, or a DistributedDataParallel.
template <class Model>
concept HasModule = std::derived_from<Model, torch::nn::Module> || requires(const Model& model) {
  { *model.module() } -> std::convertible_to<const torch::nn::Module&>;
} || requires(const Model& model) {
  { *model } -> std::convertible_to<const torch::nn::Module&>;
};

/// The module of one.
template <class Model>
const torch::nn::Module& module_of(const Model& model) {
  if constexpr (std::derived_from<Model, torch::nn::Module>) {
    return model;
  } else if constexpr (requires { *model.module(); }) {
    return *model.module();
  } else if constexpr (HasModule<Model>) {
    return *model;
  } else {
    static_assert(lockstep::detail::kNever<Model>,
                  "lockstep: expected a module, a ModuleHolder or pointer to one, or a "
                  "DistributedDataParallel");
  }
}
}  // namespace detail

/// Throws MismatchError on every rank if a parameter or buffer of the model, or a value in the
/// optimizer's options or state, is not bitwise identical on all ranks; names the first. Takes a
/// few milliseconds per 10 million parameters: call it once per epoch. The group stays usable.
/// With LOCKSTEP_CHECK=full, DistributedDataParallel itself compares the parameters every 100
/// synchronised backward passes.
/// Collective. `model`: a module, a ModuleHolder or shared_ptr, or a DistributedDataParallel.
template <class Model>
void assert_in_sync(const Model& model, const torch::optim::Optimizer& optimizer,
                    const Group& group = default_group(),
                    std::source_location where = std::source_location::current()) {
  detail::assert_in_sync(detail::module_of(model), &optimizer, group, where);
}
template <class Model>
void assert_in_sync(const Model& model, const Group& group = default_group(),
                    std::source_location where = std::source_location::current()) {
  detail::assert_in_sync(detail::module_of(model), nullptr, group, where);
}

}  // namespace lockstep::nn
