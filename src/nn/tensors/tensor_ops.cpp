#include <lockstep/nn/tensor_ops.hpp>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <lockstep/detail/collective.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/tensor_async.hpp>
#include <lockstep/nn/tensor_trees.hpp>
#include <lockstep/objects.hpp>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "nn/elements/elements.hpp"
#include "nn/elements/memory_ranges.hpp"
#include "nn/error.hpp"
#include "nn/tensors/tensor_call.hpp"
#include "record/signature.hpp"

namespace lockstep::nn {

using lockstep::detail::Collective;

/// A pending operation; it lives until that has completed.
struct detail::TensorOperation {
  PreparedCall call;
  bool is_written = false;  ///< back
  Work work{};              // last: may be running until destroyed
};

namespace {

using detail::TensorOperation;

PreparedCall prepare(TensorCall call, const Group& group, std::source_location where) {
  const Op op = call.op;
  const int peer = call.root;
  const ErrorContext context = context_of(std::string(name_of(op)), group, where);
  PreparedCall prepared(std::move(call), kOperations, group, context);
  if (internal::is_pair(op)) {
    const std::string text =
        internal::why_no_peer(op == Op::send ? "dst" : "src", peer, group.rank(), group.size());
    if (!text.empty()) throw UsageError(context, text);
  }
  return prepared;
}

PreparedCall run(TensorCall call, const Group& group, Timeout timeout, std::source_location where) {
  const at::NoGradGuard no_grad;
  PreparedCall prepared = guard_of(call.op, group, where).run([&] {
    PreparedCall made = prepare(std::move(call), group, where);
    made.run(group, timeout);
    return made;
  });
  prepared.write_back();
  return prepared;
}

template <class W = TensorWork>
W start(TensorCall call, const Group& group, Timeout timeout, std::source_location where) {
  return guard_of(call.op, group, where).run([&] {
    auto operation = std::make_shared<TensorOperation>(prepare(std::move(call), group, where));
    operation->work = operation->call.post(group, timeout);
    return W(std::move(operation));
  });
}

/// One operation in place on each tensor, with the values from before the first.
void run_each(const TensorCall& call, const std::vector<at::Tensor>& tensors, const Group& group,
              Timeout timeout, std::source_location where, const char* operation = nullptr,
              const lockstep::detail::TimeLimit* of_all = nullptr) {
  const at::NoGradGuard no_grad;
  const ErrorContext context =
      context_of(operation != nullptr ? operation : std::string(name_of(call.op)), group, where);
  Collective(context.operation, group, where).run([&] {
    std::vector<TensorCall> calls(tensors.size(), call);
    for (std::size_t i = 0; i < tensors.size(); ++i) calls[i].outs = {tensors[i]};
    PreparedCalls(std::move(calls), kOperations, group, context).run(group, timeout, of_all);
  });
}

}  // namespace

void TensorWork::wait() {
  if (!operation_) return;
  operation_->work.wait();
  if (std::exchange(operation_->is_written, true)) return;
  const at::NoGradGuard no_grad;
  operation_->call.write_back();
}

bool TensorWork::done() const { return !operation_ || operation_->work.done(); }

std::vector<at::Tensor> TensorsWork::wait() {
  TensorWork::wait();
  const at::NoGradGuard no_grad;
  return operation_ ? operation_->call.rows() : std::vector<at::Tensor>();
}

DType dtype_of(const at::Tensor& tensor, std::source_location where) {
  const ErrorContext context{"dtype_of", "", -1, 0, where};
  if (const auto dtype = dtype_of(tensor.scalar_type())) return *dtype;
  throw UsageError(context, fmt::format("cannot reduce tensors of type {}; convert to {}",
                                        c10::toString(tensor.scalar_type()), kReducible));
}

Elements elements_of(const at::Tensor& tensor, std::source_location where) {
  const ErrorContext context{"elements_of", "", -1, 0, where};
  check_tensor(tensor, kOperations, context);
  if (!tensor.is_cpu() || !is_dense(tensor)) {
    throw UsageError(
        context,
        "expected a contiguous CPU tensor, not a conjugate or negative view or a zero tensor: "
        "pass cpu().clone(at::MemoryFormat::Contiguous)");
  }
  return {tensor.data_ptr(), static_cast<std::size_t>(tensor.numel()), dtype_of(tensor, where)};
}

void all_reduce(at::Tensor& data, ReduceOp op, const Group& group, Timeout timeout,
                std::source_location where) {
  run({.op = Op::all_reduce, .reduce = op, .outs = {data}}, group, timeout, where);
}
TensorWork all_reduce_async(const at::Tensor& data, ReduceOp op, const Group& group,
                            Timeout timeout, std::source_location where) {
  return start({.op = Op::all_reduce, .reduce = op, .outs = {data}}, group, timeout, where);
}

void reduce(at::Tensor& data, int dst, ReduceOp op, const Group& group, Timeout timeout,
            std::source_location where) {
  run({.op = Op::reduce, .reduce = op, .root = dst, .outs = {data}}, group, timeout, where);
}
TensorWork reduce_async(const at::Tensor& data, int dst, ReduceOp op, const Group& group,
                        Timeout timeout, std::source_location where) {
  return start({.op = Op::reduce, .reduce = op, .root = dst, .outs = {data}}, group, timeout,
               where);
}

void broadcast(at::Tensor& data, int src, const Group& group, Timeout timeout,
               std::source_location where) {
  run({.op = Op::broadcast, .root = src, .outs = {data}}, group, timeout, where);
}
TensorWork broadcast_async(const at::Tensor& data, int src, const Group& group, Timeout timeout,
                           std::source_location where) {
  return start({.op = Op::broadcast, .root = src, .outs = {data}}, group, timeout, where);
}

std::vector<at::Tensor> all_gather(const at::Tensor& data, const Group& group, Timeout timeout,
                                   std::source_location where) {
  return run({.op = Op::all_gather, .ins = {data}}, group, timeout, where).rows();
}
TensorsWork all_gather_async(const at::Tensor& data, const Group& group, Timeout timeout,
                             std::source_location where) {
  return start<TensorsWork>({.op = Op::all_gather, .ins = {data}}, group, timeout, where);
}

std::vector<at::Tensor> gather(const at::Tensor& data, int dst, const Group& group, Timeout timeout,
                               std::source_location where) {
  return run({.op = Op::gather, .root = dst, .ins = {data}}, group, timeout, where).rows();
}
TensorsWork gather_async(const at::Tensor& data, int dst, const Group& group, Timeout timeout,
                         std::source_location where) {
  return start<TensorsWork>({.op = Op::gather, .root = dst, .ins = {data}}, group, timeout, where);
}

namespace {

/// parts: not used elsewhere than on src.
TensorCall scatter_of(const at::Tensor& data, const std::vector<at::Tensor>& parts, int src,
                      const Group& group) {
  TensorCall call{.op = Op::scatter, .root = src, .outs = {data}};
  if (group.rank() == src) call.ins = parts;
  return call;
}

}  // namespace

void scatter(at::Tensor& data, const std::vector<at::Tensor>& parts, int src, const Group& group,
             Timeout timeout, std::source_location where) {
  run(scatter_of(data, parts, src, group), group, timeout, where);
}
TensorWork scatter_async(const at::Tensor& data, const std::vector<at::Tensor>& parts, int src,
                         const Group& group, Timeout timeout, std::source_location where) {
  return start(scatter_of(data, parts, src, group), group, timeout, where);
}

void reduce_scatter(at::Tensor& data, const std::vector<at::Tensor>& parts, ReduceOp op,
                    const Group& group, Timeout timeout, std::source_location where) {
  run({.op = Op::reduce_scatter, .reduce = op, .ins = parts, .outs = {data}}, group, timeout,
      where);
}
TensorWork reduce_scatter_async(const at::Tensor& data, const std::vector<at::Tensor>& parts,
                                ReduceOp op, const Group& group, Timeout timeout,
                                std::source_location where) {
  return start({.op = Op::reduce_scatter, .reduce = op, .ins = parts, .outs = {data}}, group,
               timeout, where);
}

std::vector<at::Tensor> all_to_all(const std::vector<at::Tensor>& parts, const Group& group,
                                   Timeout timeout, std::source_location where) {
  return run({.op = Op::all_to_all, .ins = parts}, group, timeout, where).rows();
}
TensorsWork all_to_all_async(const std::vector<at::Tensor>& parts, const Group& group,
                             Timeout timeout, std::source_location where) {
  return start<TensorsWork>({.op = Op::all_to_all, .ins = parts}, group, timeout, where);
}

void send(const at::Tensor& data, int dst, const Group& group, Timeout timeout,
          std::source_location where) {
  run({.op = Op::send, .root = dst, .ins = {data}}, group, timeout, where);
}
TensorWork send_async(const at::Tensor& data, int dst, const Group& group, Timeout timeout,
                      std::source_location where) {
  return start({.op = Op::send, .root = dst, .ins = {data}}, group, timeout, where);
}

void recv(at::Tensor& data, int src, const Group& group, Timeout timeout,
          std::source_location where) {
  run({.op = Op::recv, .root = src, .outs = {data}}, group, timeout, where);
}
TensorWork recv_async(const at::Tensor& data, int src, const Group& group, Timeout timeout,
                      std::source_location where) {
  return start({.op = Op::recv, .root = src, .outs = {data}}, group, timeout, where);
}

void all_reduce_dict(std::map<std::string, at::Tensor>& dict, ReduceOp op, const Group& group,
                     Timeout timeout, std::source_location where) {
  std::vector<lockstep::detail::DictEntry> entries;
  lockstep::detail::ObjectCall call{.op = lockstep::detail::ObjectOp::all_reduce_dict,
                                    .type = typeid(at::Tensor),
                                    .group = group,
                                    .limit = lockstep::detail::TimeLimit(timeout),
                                    .where = where};
  lockstep::detail::prepare(call, [&] {
    for (const auto& [key, tensor] : dict) {
      const ErrorContext context = context_of("all_reduce_dict", group, where);
      check_tensor(tensor, kOperations, context);
      check_result(tensor, context);
      check_reduction(tensor.scalar_type(), op, context);
      entries.push_back({key, static_cast<std::size_t>(tensor.numel())});
    }
  });
  lockstep::detail::check_dicts(call, entries, op);
  std::vector<at::Tensor> tensors;
  for (const auto& [key, tensor] : dict) tensors.push_back(tensor);
  run_each({.op = Op::all_reduce, .reduce = op}, tensors, group, {}, where, "all_reduce_dict",
           &call.limit);
}

void all_reduce_params(const std::vector<at::Tensor>& params, bool coalesce, double bucket_size_mb,
                       ReduceOp op, const Group& group, Timeout timeout,
                       std::source_location where) {
  const TensorCall all_reduction{.op = Op::all_reduce, .reduce = op};
  const auto once = unique_tensors(params);
  const lockstep::detail::TimeLimit limit(timeout);  // of all its collectives together
  if (!coalesce) {
    return run_each(all_reduction, once, group, {}, where, "all_reduce_params", &limit);
  }
  const at::NoGradGuard no_grad;
  const ErrorContext context = context_of("all_reduce_params", group, where);
  Collective(context.operation, group, where).run([&] {
    for (const at::Tensor& param : once) {
      check_tensor(param, kOperations, context);
      check_result(param, context);
      check_reduction(param.scalar_type(), op, context);
    }
    const auto reduce_together = [&](const std::vector<at::Tensor>& some) {
      std::vector<at::Tensor> flat;
      for (const at::Tensor& param : some) flat.push_back(param.reshape({-1}));
      at::Tensor all = at::cat(flat);
      all_reduce(all, op, group, limit.timeout(), where);
      std::int64_t offset = 0;
      for (at::Tensor param : some) {
        param.copy_(all.narrow(0, offset, param.numel()).view(param.sizes()));
        offset += param.numel();
      }
    };
    std::map<at::ScalarType, std::vector<at::Tensor>> open;
    std::map<at::ScalarType, std::size_t> n_bytes;
    const auto apart = without_shared_memory(once);
    for (const at::Tensor& param : apart) {
      auto& bucket = open[param.scalar_type()];
      auto& size = n_bytes[param.scalar_type()];
      bucket.push_back(param);
      size += param.nbytes();
      if (bucket_size_mb < 0 || static_cast<double>(size) < bucket_size_mb * 1024 * 1024) continue;
      reduce_together(bucket);
      bucket.clear();
      size = 0;
    }
    for (const auto& [type, bucket] : open) {
      if (!bucket.empty()) reduce_together(bucket);
    }
    for (std::size_t i = 0; i < once.size(); ++i) {
      if (!apart[i].is_same(once[i])) write_back(apart[i], once[i]);
    }
  });
}

at::Device get_comm_device(const Group& /*group*/) { return at::kCPU; }

void detail::all_reduce_each(const std::vector<at::Tensor>& tensors, ReduceOp op,
                             const Group& group, Timeout timeout, std::source_location where) {
  run_each({.op = Op::all_reduce, .reduce = op}, tensors, group, timeout, where);
}

void detail::reduce_each(const std::vector<at::Tensor>& tensors, int dst, ReduceOp op,
                         const Group& group, Timeout timeout, std::source_location where) {
  run_each({.op = Op::reduce, .reduce = op, .root = dst}, tensors, group, timeout, where);
}

void detail::separate(const char* operation, const std::vector<at::Tensor>& results,
                      TensorsOfTrees& parts, const Group& group, std::source_location where,
                      int src) {
  if (results.size() < 2) return;
  const Collective collective(operation, group, where, src < 0 ? Op::barrier : Op::recv);
  collective.run([&] {
    if (const auto shared = find_shared_results(results)) {
      throw UsageError(context_of(operation, group, where),
                       fmt::format("tensors {} and {} share memory; give each its own",
                                   shared->first, shared->second));
    }
    MemoryRanges written;
    for (std::size_t i = 0; i < results.size(); ++i) written.add(results[i], i);
    for (auto& of_tensor : parts) {
      for (at::Tensor& part : of_tensor) {
        if (written.overlap(part)) part = part.clone();
      }
    }
  });
}

detail::TensorsOfTrees detail::parts_by_tensor(const char* operation, const TensorsOfTrees& parts,
                                               const std::vector<at::Tensor>& like,
                                               const Group& group, std::source_location where) {
  const ErrorContext context = context_of(operation, group, where);
  return Collective(operation, group, where).run([&] {
    check_n_parts(parts.size(), group, context);
    TensorsOfTrees by_tensor(like.size());
    for (const auto& part : parts) {
      if (part.size() != like.size()) {
        throw UsageError(context,
                         fmt::format("parts must hold the same tensors: got {} and {} of them",
                                     like.size(), part.size()));
      }
      for (std::size_t i = 0; i < part.size(); ++i) by_tensor[i].push_back(part[i]);
    }
    for (std::size_t i = 0; i < like.size(); ++i) {
      check_tensor(like[i], kOperations, context);
      check_parts(by_tensor[i], like[i], group, kOperations, context);
    }
    return by_tensor;
  });
}

at::Device detail::common_device(const std::vector<at::Tensor>& tensors,
                                 std::source_location where) {
  const ErrorContext context{"get_data_device", "", -1, 0, where};
  std::optional<at::Device> device;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.device() == device.value_or(tensor.device())) {
      if (tensor.defined()) device = tensor.device();
      continue;
    }
    throw UsageError(
        context,
        fmt::format("tensors are on {} and {}: move them to one device with cast_data_device",
                    device->str(), tensor.device().str()));
  }
  if (!device) throw UsageError(context, "there is no tensor in the data");
  return *device;
}

}  // namespace lockstep::nn
