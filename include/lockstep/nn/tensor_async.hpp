#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <source_location>
#include <utility>
#include <vector>

#include <lockstep/detail/arguments.hpp>
#include <lockstep/group.hpp>
#include <lockstep/types.hpp>
#include <lockstep/world.hpp>

/// @file
/// The operations of tensor_ops.hpp on the group's worker thread, in call order. Sizes, types and
/// errors are the same; UsageErrors are thrown at once.
///
///     auto work = lockstep::nn::all_reduce_async(loss);
///     ...
///     work.wait();
///
/// The result is in the tensors (or returned by wait) only after wait() has returned, because wait
/// fills strided and CUDA tensors. Do not access the tensors until then; the operation keeps them
/// alive. Threads: call wait() on the thread that uses the tensors.
namespace lockstep::detail {
template <>
inline constexpr bool kHasOwnOperations<at::Tensor> = true;
}  // namespace lockstep::detail

namespace lockstep::nn {

namespace detail {
struct TensorOperation;
}

/// An asynchronous operation on tensors. Copyable handle.
class [[nodiscard]] TensorWork {
 public:
  TensorWork() = default;  ///< done
  explicit TensorWork(std::shared_ptr<detail::TensorOperation> operation)
      : operation_(std::move(operation)) {}
  /// Blocks until the operation has completed; rethrows its error. May be called again.
  void wait();
  /// Whether wait() would not block.
  bool done() const;

 protected:
  std::shared_ptr<detail::TensorOperation> operation_;
};

/// The same for an operation that returns tensors.
class [[nodiscard]] TensorsWork : private TensorWork {
 public:
  using TensorWork::done;
  using TensorWork::TensorWork;
  std::vector<at::Tensor> wait();
};

/// The asynchronous forms of tensor_ops.hpp.
TensorWork all_reduce_async(const at::Tensor& data, ReduceOp op = ReduceOp::sum,
                            const Group& group = default_group(), Timeout timeout = {},
                            std::source_location where = std::source_location::current());
inline TensorWork all_reduce_async(const at::Tensor& data, const CallOptions& options,
                                   std::source_location where = std::source_location::current()) {
  return all_reduce_async(data, options.op, lockstep::detail::group_of(options, where),
                          options.timeout, where);
}
TensorWork reduce_async(const at::Tensor& data, int dst = 0, ReduceOp op = ReduceOp::sum,
                        const Group& group = default_group(), Timeout timeout = {},
                        std::source_location where = std::source_location::current());
inline TensorWork reduce_async(const at::Tensor& data, int dst, const CallOptions& options,
                               std::source_location where = std::source_location::current()) {
  return reduce_async(data, dst, options.op, lockstep::detail::group_of(options, where),
                      options.timeout, where);
}
TensorWork broadcast_async(const at::Tensor& data, int src = 0,
                           const Group& group = default_group(), Timeout timeout = {},
                           std::source_location where = std::source_location::current());
TensorsWork all_gather_async(const at::Tensor& data, const Group& group = default_group(),
                             Timeout timeout = {},
                             std::source_location where = std::source_location::current());
TensorsWork gather_async(const at::Tensor& data, int dst = 0, const Group& group = default_group(),
                         Timeout timeout = {},
                         std::source_location where = std::source_location::current());
TensorWork scatter_async(const at::Tensor& data, const std::vector<at::Tensor>& parts, int src = 0,
                         const Group& group = default_group(), Timeout timeout = {},
                         std::source_location where = std::source_location::current());
TensorWork reduce_scatter_async(const at::Tensor& data, const std::vector<at::Tensor>& parts,
                                ReduceOp op = ReduceOp::sum, const Group& group = default_group(),
                                Timeout timeout = {},
                                std::source_location where = std::source_location::current());
inline TensorWork reduce_scatter_async(
    const at::Tensor& data, const std::vector<at::Tensor>& parts, const CallOptions& options,
    std::source_location where = std::source_location::current()) {
  return reduce_scatter_async(data, parts, options.op, lockstep::detail::group_of(options, where),
                              options.timeout, where);
}
TensorsWork all_to_all_async(const std::vector<at::Tensor>& parts,
                             const Group& group = default_group(), Timeout timeout = {},
                             std::source_location where = std::source_location::current());
TensorWork send_async(const at::Tensor& data, int dst, const Group& group = default_group(),
                      Timeout timeout = {},
                      std::source_location where = std::source_location::current());
TensorWork recv_async(const at::Tensor& data, int src, const Group& group = default_group(),
                      Timeout timeout = {},
                      std::source_location where = std::source_location::current());

}  // namespace lockstep::nn
