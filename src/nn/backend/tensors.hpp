#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <lockstep/error.hpp>
#include <lockstep/types.hpp>
#include <vector>

namespace lockstep::backend {

using Tensors = std::vector<at::Tensor>;

/// Throws UsageError for one that lockstep lacks.
ReduceOp reduction_of(const c10d::ReduceOp& op, const ErrorContext& context);
/// c10d's number of a rank, as a Group takes it, which checks it.
int rank_of(std::int64_t rank);

/// The tensor, or the list of tensors, of a list of one. Throws UsageError for others.
const at::Tensor& only(const Tensors& tensors, const ErrorContext& context);
const Tensors& only_list(const std::vector<Tensors>& lists, const ErrorContext& context);

/// The memory of tensors, which keeps it.
using Storages = std::vector<c10::Storage>;
Storages storages_of(const Tensors& some, const Tensors& others);

}  // namespace lockstep::backend
