#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::nn {

/// Names and hashes of values that should be the same on all ranks.
using Fingerprints = std::vector<std::pair<std::string, std::uint64_t>>;

/// Of values, shape and type.
std::uint64_t hash_of_tensor(const at::Tensor& tensor);

Fingerprints fingerprints_of_parameters(const torch::nn::Module& module);

/// Throws MismatchError on every rank, naming the first value that differs from another rank's,
/// then `advice`. Skips ranks without fingerprints. Collective.
void check_fingerprints(const Fingerprints& mine, const Group& group, const ErrorContext& context,
                        const char* advice);

}  // namespace lockstep::nn
