#pragma once

#include <ATen/core/Tensor.h>

#include <source_location>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/types.hpp>
#include <lockstep/world.hpp>

/// Collective operations that autograd knows: each returns a new tensor, with a backward that is a
/// collective operation too. The gradients are those of the sum of all ranks' losses:
///
///     const auto all = nn::functional::all_gather(embeddings);   // of all ranks
///     const auto loss = contrastive_loss(at::cat(all));          // the same on all ranks
///     loss.backward();                      // embeddings: the sum of the ranks' gradients
///
/// Where each rank computes the same loss of the whole batch, as here, the gradient is size() times
/// that of one device: DistributedDataParallel, which averages over the ranks, has it right; else
/// divide the loss by the number of ranks.
///
/// All ranks call the same operations in the same order, and all of them run backward, or none.
/// Ranks compare the operation, shapes, types and whether a gradient is needed (an input has
/// requires_grad, and no NoGradGuard) before any data is sent, in one small message: MismatchError
/// names the ranks that differ. In backward they compare which call it is of. A rank that does not
/// run backward is named by the TimeoutError of the others. Backward of the calls runs in the
/// inverse order, as autograd does it on all ranks with the same graph.
///
/// Gradients have gradients: each backward consists of these operations. Where a rank's tensor has
/// no part in the result (see broadcast, scatter) they are zero; such a rank takes part in second
/// gradients only if it has passed tensors with requires_grad, and asks for their gradients.
///
/// Tensors are dense, of any type but quantized ones, on CPUs or CUDA (through host memory, as in
/// tensor_ops.hpp), of at most 10 dimensions. Sums and means only: other reductions have no such
/// gradient. Errors and threads as for the Group's operations (group.hpp); what is wrong with an
/// argument is a UsageError. `timeout`: of forward; backward has the group's.
namespace lockstep::nn::functional {

/// The sum or mean of all ranks' data, on each rank. Gradient: the sum or mean of the ranks'.
[[nodiscard]] at::Tensor all_reduce(const at::Tensor& data, ReduceOp op = ReduceOp::sum,
                                    const Group& group = default_group(), Timeout timeout = {},
                                    std::source_location where = std::source_location::current());
[[nodiscard]] inline at::Tensor all_reduce(
    const at::Tensor& data, const CallOptions& options,
    std::source_location where = std::source_location::current()) {
  return all_reduce(data, options.op, lockstep::detail::group_of(options, where), options.timeout,
                    where);
}

/// Every rank's data, by rank. Their first sizes may differ. Gradient: the sum over the ranks of
/// those of this rank's data.
[[nodiscard]] std::vector<at::Tensor> all_gather(
    const at::Tensor& data, const Group& group = default_group(), Timeout timeout = {},
    std::source_location where = std::source_location::current());

/// The sum or mean of every rank's parts[rank]. parts: size() tensors of one type, with the same
/// shapes on all ranks; the first sizes of two parts may differ. Gradient of parts[r]: that of rank
/// r's result, divided by size() for a mean.
[[nodiscard]] at::Tensor reduce_scatter(
    const std::vector<at::Tensor>& parts, ReduceOp op = ReduceOp::sum,
    const Group& group = default_group(), Timeout timeout = {},
    std::source_location where = std::source_location::current());
[[nodiscard]] inline at::Tensor reduce_scatter(
    const std::vector<at::Tensor>& parts, const CallOptions& options,
    std::source_location where = std::source_location::current()) {
  return reduce_scatter(parts, options.op, lockstep::detail::group_of(options, where),
                        options.timeout, where);
}

/// Every rank q's parts[rank], by q. parts: size() tensors of one shape and type. Gradient of
/// parts[r]: that of what rank r got.
[[nodiscard]] std::vector<at::Tensor> all_to_all(
    const std::vector<at::Tensor>& parts, const Group& group = default_group(),
    Timeout timeout = {}, std::source_location where = std::source_location::current());

/// src's data, on each rank; the others' data has its shape and type. Gradient: on src the sum of
/// the ranks', zero on the others.
[[nodiscard]] at::Tensor broadcast(const at::Tensor& data, int src = 0,
                                   const Group& group = default_group(), Timeout timeout = {},
                                   std::source_location where = std::source_location::current());

/// On dst the sum or mean of all ranks' data. On the others zeros, which must go into the loss
/// (`loss + result.sum()`), because backward is for all ranks. Gradient: dst's, divided by size()
/// for a mean.
[[nodiscard]] at::Tensor reduce(const at::Tensor& data, int dst = 0, ReduceOp op = ReduceOp::sum,
                                const Group& group = default_group(), Timeout timeout = {},
                                std::source_location where = std::source_location::current());
[[nodiscard]] inline at::Tensor reduce(
    const at::Tensor& data, int dst, const CallOptions& options,
    std::source_location where = std::source_location::current()) {
  return reduce(data, dst, options.op, lockstep::detail::group_of(options, where), options.timeout,
                where);
}

/// On dst every rank's data, by rank. On the others zeros of these shapes, of which one must go
/// into the loss, as of reduce. Gradient: that of dst's tensor for this rank.
[[nodiscard]] std::vector<at::Tensor> gather(
    const at::Tensor& data, int dst = 0, const Group& group = default_group(), Timeout timeout = {},
    std::source_location where = std::source_location::current());

/// src's parts[rank]: size() tensors of one shape and type. On the other ranks parts may be empty,
/// and the result is then on the CPU; if not, they have src's shape and type. Gradient, on src:
/// that of each rank's result; zero on the others.
[[nodiscard]] at::Tensor scatter(const std::vector<at::Tensor>& parts, int src = 0,
                                 const Group& group = default_group(), Timeout timeout = {},
                                 std::source_location where = std::source_location::current());

/// For a layer of which each rank computes a part from all of its input (column-parallel): a copy
/// of data, which has the same values on all ranks. Gradient: the sum of the ranks'.
[[nodiscard]] at::Tensor replicate(const at::Tensor& data, const Group& group = default_group(),
                                   Timeout timeout = {},
                                   std::source_location where = std::source_location::current());

/// For a layer of which each rank computes a part of its output's sum (row-parallel): the sum of
/// all ranks' data, from which all ranks compute the same loss, once. Gradient: the result's own,
/// without a message.
[[nodiscard]] at::Tensor reduce_replicated(
    const at::Tensor& data, const Group& group = default_group(), Timeout timeout = {},
    std::source_location where = std::source_location::current());

}  // namespace lockstep::nn::functional
