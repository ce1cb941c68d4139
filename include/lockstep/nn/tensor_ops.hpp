#pragma once

#include <ATen/core/Tensor.h>

#include <source_location>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/types.hpp>

/// The operations over tensors: sizes are those of the tensors, errors and threads those of the
/// Group's operations (group.hpp). Tensors that are not contiguous, or on CUDA, are copied to the
/// host and back. UsageError for a type without a DType (bool, complex), another device, a sparse
/// or undefined tensor.
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

/// On dst: data <- reduction of every rank's data. Elsewhere data is left as it was.
void reduce(at::Tensor& data, int dst = 0, ReduceOp op = ReduceOp::sum,
            const Group& group = default_group(), Deadline deadline = {},
            std::source_location where = std::source_location::current());

/// all_gather on dst only; empty elsewhere.
std::vector<at::Tensor> gather(const at::Tensor& data, int dst = 0,
                               const Group& group = default_group(), Deadline deadline = {},
                               std::source_location where = std::source_location::current());

/// data <- part `rank` of src's parts: size() tensors of data's shape and type; elsewhere they are
/// not used. Any element type: bytes move.
void scatter(at::Tensor& data, const std::vector<at::Tensor>& parts, int src = 0,
             const Group& group = default_group(), Deadline deadline = {},
             std::source_location where = std::source_location::current());

/// data <- reduction of every rank's parts[rank]: size() tensors of data's shape and type.
void reduce_scatter(at::Tensor& data, const std::vector<at::Tensor>& parts,
                    ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                    Deadline deadline = {},
                    std::source_location where = std::source_location::current());

/// By rank: what that rank has as parts[this rank]. size() tensors of one shape and type, the same
/// on all ranks. Any element type: bytes move.
std::vector<at::Tensor> all_to_all(const std::vector<at::Tensor>& parts,
                                   const Group& group = default_group(), Deadline deadline = {},
                                   std::source_location where = std::source_location::current());

/// To and from another rank; the receiver's tensor has the sender's type and number of elements.
void send(const at::Tensor& data, int dst, const Group& group = default_group(),
          Deadline deadline = {}, std::source_location where = std::source_location::current());
void recv(at::Tensor& data, int src, const Group& group = default_group(), Deadline deadline = {},
          std::source_location where = std::source_location::current());

/// The DType of a tensor's elements. Throws UsageError for a type without one.
DType dtype_of(const at::Tensor& tensor,
               std::source_location where = std::source_location::current());

/// A contiguous CPU tensor's elements, for the operations of Group.
/// Throws UsageError where the tensor is not such.
Elements elements_of(const at::Tensor& tensor,
                     std::source_location where = std::source_location::current());

}  // namespace lockstep::nn
