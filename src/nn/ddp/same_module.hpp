#pragma once

#include <torch/nn/module.h>

#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <unordered_set>

namespace lockstep::nn::detail {

/// The parameters whose gradients are sparse.
std::unordered_set<const void*> sparse_parameters(const torch::nn::Module& module);

/// Throws UsageError for a module whose gradients cannot be averaged, before anything is sent, and
/// the same MismatchError on every rank if the ranks' modules differ. Collective.
void check_module(const torch::nn::Module& module, const Group& group, const ErrorContext& context);

}  // namespace lockstep::nn::detail
