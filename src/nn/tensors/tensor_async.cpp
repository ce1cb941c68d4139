#include <lockstep/nn/tensor_async.hpp>

#include <lockstep/detail/collective.hpp>
#include <lockstep/nn/tensor_ops.hpp>
#include <memory>
#include <utility>

#include "nn/tensors/tensor_buffers.hpp"

namespace lockstep::nn {

/// Resources of a pending operation, kept until it completes.
struct detail::TensorOperation {
  at::Tensor data{};             ///< the caller's, to be filled; undefined if none
  at::Tensor dense{};            ///< the data passed to the group
  at::Tensor parts{};            ///< further input of the operation
  at::Tensor rows{};             ///< of the output tensors; undefined if none
  at::Device device = at::kCPU;  ///< of these
  Work work{};                   // last: may be running until destroyed
};

namespace {

using detail::TensorOperation;
using lockstep::detail::Collective;

template <class W = TensorWork>
W start(TensorOperation operation) {
  return W(std::make_shared<TensorOperation>(std::move(operation)));
}

}  // namespace

void TensorWork::wait() {
  if (!operation_) return;
  operation_->work.wait();
  if (!operation_->data.defined()) return;
  const at::NoGradGuard no_grad;
  at::Tensor data = std::exchange(operation_->data, at::Tensor());
  copy_back(operation_->dense, data);
}

bool TensorWork::done() const { return !operation_ || operation_->work.done(); }

std::vector<at::Tensor> TensorsWork::wait() {
  TensorWork::wait();
  if (!operation_ || !operation_->rows.defined()) return {};
  const at::NoGradGuard no_grad;
  return rows_on(operation_->device, operation_->rows);
}

TensorWork all_reduce_async(const at::Tensor& data, ReduceOp op, const Group& group,
                            Timeout timeout, std::source_location where) {
  return Collective("all_reduce", group, where).run([&] {
    const at::Tensor dense = for_result("all_reduce", data, group, where);
    return start(
        {.data = data,
         .dense = dense,
         .work = group.all_reduce_async(reduced_elements("all_reduce", dense, op, group, where), op,
                                        timeout, where)});
  });
}

TensorWork reduce_async(const at::Tensor& data, int dst, ReduceOp op, const Group& group,
                        Timeout timeout, std::source_location where) {
  return Collective("reduce", group, where).run([&] {
    const at::Tensor dense = for_result("reduce", data, group, where);
    return start({.data = group.rank() == dst ? data : at::Tensor(),
                  .dense = dense,
                  .work = group.reduce_async(reduced_elements("reduce", dense, op, group, where),
                                             dst, op, timeout, where)});
  });
}

TensorWork broadcast_async(const at::Tensor& data, int src, const Group& group, Timeout timeout,
                           std::source_location where) {
  return Collective("broadcast", group, where).run([&] {
    const at::Tensor dense = for_result("broadcast", data, group, where);
    return start({.data = group.rank() == src ? at::Tensor() : data,
                  .dense = dense,
                  .work = group.broadcast_async(bytes_of(dense), src, timeout, where)});
  });
}

TensorsWork all_gather_async(const at::Tensor& data, const Group& group, Timeout timeout,
                             std::source_location where) {
  return Collective("all_gather", group, where).run([&] {
    const at::Tensor dense = for_group("all_gather", data, group, where);
    const at::Tensor all = rows_like(dense, group);
    return start<TensorsWork>(
        {.dense = dense,
         .rows = all,
         .device = data.device(),
         .work = group.all_gather_async(bytes_of(dense), bytes_of(all), timeout, where)});
  });
}

TensorsWork gather_async(const at::Tensor& data, int dst, const Group& group, Timeout timeout,
                         std::source_location where) {
  return Collective("gather", group, where).run([&] {
    const at::Tensor dense = for_group("gather", data, group, where);
    const at::Tensor all = group.rank() == dst ? rows_like(dense, group) : at::Tensor();
    return start<TensorsWork>(
        {.dense = dense,
         .rows = all,
         .device = data.device(),
         .work = group.gather_async(bytes_of(dense), all.defined() ? bytes_of(all) : Elements{},
                                    dst, timeout, where)});
  });
}

TensorWork scatter_async(const at::Tensor& data, const std::vector<at::Tensor>& parts, int src,
                         const Group& group, Timeout timeout, std::source_location where) {
  return Collective("scatter", group, where).run([&] {
    const at::Tensor dense = for_result("scatter", data, group, where);
    const at::Tensor all =
        group.rank() == src ? join_parts("scatter", parts, data, group, where) : at::Tensor();
    return start({.data = data,
                  .dense = dense,
                  .parts = all,
                  .work = group.scatter_async(all.defined() ? bytes_of(all) : Elements{},
                                              bytes_of(dense), src, timeout, where)});
  });
}

TensorWork reduce_scatter_async(const at::Tensor& data, const std::vector<at::Tensor>& parts,
                                ReduceOp op, const Group& group, Timeout timeout,
                                std::source_location where) {
  return Collective("reduce_scatter", group, where).run([&] {
    const at::Tensor dense = for_result("reduce_scatter", data, group, where);
    const at::Tensor all = join_parts("reduce_scatter", parts, data, group, where);
    return start(
        {.data = data,
         .dense = dense,
         .parts = all,
         .work = group.reduce_scatter_async(
             reduced_elements("reduce_scatter", all, op, group, where),
             reduced_elements("reduce_scatter", dense, op, group, where), op, timeout, where)});
  });
}

TensorsWork all_to_all_async(const std::vector<at::Tensor>& parts, const Group& group,
                             Timeout timeout, std::source_location where) {
  return Collective("all_to_all", group, where).run([&] {
    const at::Tensor first = parts.empty() ? at::Tensor() : parts[0];
    if (!parts.empty()) check_tensor("all_to_all", first, group, where);
    const at::Tensor all = join_parts("all_to_all", parts, first, group, where);
    const at::Tensor out = at::empty_like(all);
    return start<TensorsWork>(
        {.parts = all,
         .rows = out,
         .device = first.device(),
         .work = group.all_to_all_async(bytes_of(all), bytes_of(out), timeout, where)});
  });
}

TensorWork send_async(const at::Tensor& data, int dst, const Group& group, Timeout timeout,
                      std::source_location where) {
  return Collective(Op::send, dst, group, where).run([&] {
    const at::Tensor dense = for_group("send", data, group, where);
    return start({.dense = dense, .work = group.send_async(bytes_of(dense), dst, timeout, where)});
  });
}

TensorWork recv_async(const at::Tensor& data, int src, const Group& group, Timeout timeout,
                      std::source_location where) {
  return Collective(Op::recv, src, group, where).run([&] {
    const at::Tensor dense = for_result("recv", data, group, where);
    return start({.data = data,
                  .dense = dense,
                  .work = group.recv_async(bytes_of(dense), src, timeout, where)});
  });
}

}  // namespace lockstep::nn
