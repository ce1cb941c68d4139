#pragma once

#include <ATen/core/Tensor.h>

#include <source_location>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/types.hpp>

/// The verbs over CPU tensors: sizes are those of the tensors, errors and threads those of the
/// Group's verbs (group.hpp). Tensors that are not contiguous are copied there and back. UsageError
/// for a type without a DType (bool, complex), a device other than the CPU, a sparse or undefined
/// tensor.
namespace lockstep::nn {

/// data <- reduction of every rank's data, on all ranks. Autograd does not see it.
void all_reduce(at::Tensor& data, ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                Deadline deadline = {},
                std::source_location where = std::source_location::current());

/// data <- src's data. Any element type: bytes move.
void broadcast(at::Tensor& data, int src = 0, const Group& group = default_group(),
               Deadline deadline = {},
               std::source_location where = std::source_location::current());

/// Every rank's data, by rank: contiguous tensors of data's shape, which is the same on all ranks.
/// Any element type: bytes move.
std::vector<at::Tensor> all_gather(const at::Tensor& data, const Group& group = default_group(),
                                   Deadline deadline = {},
                                   std::source_location where = std::source_location::current());

/// The DType of a tensor's elements. Throws UsageError for a type without one.
DType dtype_of(const at::Tensor& tensor,
               std::source_location where = std::source_location::current());

/// A contiguous CPU tensor's elements, for the verbs of Group.
/// Throws UsageError where the tensor is not such.
Elements elements_of(const at::Tensor& tensor,
                     std::source_location where = std::source_location::current());

}  // namespace lockstep::nn
