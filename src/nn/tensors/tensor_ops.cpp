#include <lockstep/nn/tensor_ops.hpp>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <lockstep/detail/collective.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/tensor_trees.hpp>
#include <lockstep/objects.hpp>
#include <map>
#include <optional>

#include "nn/elements/memory_ranges.hpp"
#include "nn/error.hpp"
#include "nn/tensors/tensor_buffers.hpp"

namespace lockstep::nn {

using lockstep::detail::Collective;

namespace {

constexpr const char* kReducible = "bool, u8, i8, i16, i32, i64, f16, bf16, f32 or f64";

/// Of without_shared_memory.
void write_back_copies(const std::vector<at::Tensor>& apart,
                       const std::vector<at::Tensor>& tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!apart[i].is_same(tensors[i])) write_back(apart[i], tensors[i]);
  }
}

/// work(tensor) of each tensor, with the values from before the first.
template <class F>
void work_on_each(const char* operation, const std::vector<at::Tensor>& tensors, const Group& group,
                  std::source_location where, F work) {
  const at::NoGradGuard no_grad;
  Collective(operation, group, where).run([&] {
    auto apart = without_shared_memory(tensors);
    for (at::Tensor& tensor : apart) work(tensor);
    write_back_copies(apart, tensors);
  });
}

}  // namespace

DType dtype_of(const at::Tensor& tensor, std::source_location where) {
  if (const auto dtype = dtype_of(tensor.scalar_type())) return *dtype;
  throw UsageError({"dtype_of", "", -1, 0, where},
                   fmt::format("cannot reduce tensors of type {}; convert to {}",
                               c10::toString(tensor.scalar_type()), kReducible));
}

ReducedAs reduced_as(const char* operation, const at::Tensor& tensor, ReduceOp op,
                     const Group& group, std::source_location where) {
  const at::ScalarType type = tensor.scalar_type();
  if (const auto as = reduced_as(type, op)) return *as;
  throw UsageError(
      context_of(operation, group, where),
      fmt::format("cannot reduce a tensor of {} by {}; convert it to {}{}", c10::toString(type),
                  name_of(op), kReducible, tensor.is_complex() ? ", or use sum or mean" : ""));
}

Elements elements_of(const at::Tensor& tensor, std::source_location where) {
  check_tensor("elements_of", tensor, Group(), where);
  if (!tensor.is_cpu() || !is_dense(tensor)) {
    throw UsageError(
        {"elements_of", "", -1, 0, where},
        "expected a contiguous CPU tensor, not a conjugate or negative view or a zero tensor: "
        "pass cpu().clone(at::MemoryFormat::Contiguous)");
  }
  return {tensor.data_ptr(), static_cast<std::size_t>(tensor.numel()), dtype_of(tensor, where)};
}

void all_reduce(at::Tensor& data, ReduceOp op, const Group& group, Timeout timeout,
                std::source_location where) {
  const at::NoGradGuard no_grad;
  at::Tensor dense;
  Collective("all_reduce", group, where).run([&] {
    dense = for_result("all_reduce", data, group, where);
    group.all_reduce(reduced_elements("all_reduce", dense, op, group, where), op, timeout, where);
  });
  copy_back(dense, data);
}

void broadcast(at::Tensor& data, int src, const Group& group, Timeout timeout,
               std::source_location where) {
  const at::NoGradGuard no_grad;
  at::Tensor dense;
  Collective("broadcast", group, where).run([&] {
    dense = for_result("broadcast", data, group, where);
    group.broadcast(bytes_of(dense), src, timeout, where);
  });
  if (group.rank() != src) copy_back(dense, data);
}

std::vector<at::Tensor> all_gather(const at::Tensor& data, const Group& group, Timeout timeout,
                                   std::source_location where) {
  const at::NoGradGuard no_grad;
  at::Tensor all;
  Collective("all_gather", group, where).run([&] {
    const at::Tensor dense = for_group("all_gather", data, group, where);
    all = rows_like(dense, group);
    group.all_gather(bytes_of(dense), bytes_of(all), timeout, where);
  });
  return rows_on(data.device(), all);
}

void reduce(at::Tensor& data, int dst, ReduceOp op, const Group& group, Timeout timeout,
            std::source_location where) {
  const at::NoGradGuard no_grad;
  at::Tensor dense;
  Collective("reduce", group, where).run([&] {
    dense = for_result("reduce", data, group, where);
    group.reduce(reduced_elements("reduce", dense, op, group, where), dst, op, timeout, where);
  });
  if (group.rank() == dst) copy_back(dense, data);
}

std::vector<at::Tensor> gather(const at::Tensor& data, int dst, const Group& group, Timeout timeout,
                               std::source_location where) {
  const at::NoGradGuard no_grad;
  at::Tensor all;
  Collective("gather", group, where).run([&] {
    const at::Tensor dense = for_group("gather", data, group, where);
    if (group.rank() == dst) all = rows_like(dense, group);
    group.gather(bytes_of(dense), all.defined() ? bytes_of(all) : Elements{}, dst, timeout, where);
  });
  return all.defined() ? rows_on(data.device(), all) : std::vector<at::Tensor>();
}

void scatter(at::Tensor& data, const std::vector<at::Tensor>& parts, int src, const Group& group,
             Timeout timeout, std::source_location where) {
  const at::NoGradGuard no_grad;
  at::Tensor dense;
  Collective("scatter", group, where).run([&] {
    dense = for_result("scatter", data, group, where);
    const at::Tensor all =
        group.rank() == src ? join_parts("scatter", parts, data, group, where) : at::Tensor();
    group.scatter(all.defined() ? bytes_of(all) : Elements{}, bytes_of(dense), src, timeout, where);
  });
  copy_back(dense, data);
}

void reduce_scatter(at::Tensor& data, const std::vector<at::Tensor>& parts, ReduceOp op,
                    const Group& group, Timeout timeout, std::source_location where) {
  const at::NoGradGuard no_grad;
  at::Tensor dense;
  Collective("reduce_scatter", group, where).run([&] {
    dense = for_result("reduce_scatter", data, group, where);
    const at::Tensor all = join_parts("reduce_scatter", parts, data, group, where);
    const auto elements = [&](const at::Tensor& tensor) {
      return reduced_elements("reduce_scatter", tensor, op, group, where);
    };
    group.reduce_scatter(elements(all), elements(dense), op, timeout, where);
  });
  copy_back(dense, data);
}

std::vector<at::Tensor> all_to_all(const std::vector<at::Tensor>& parts, const Group& group,
                                   Timeout timeout, std::source_location where) {
  const at::NoGradGuard no_grad;
  at::Tensor first, out;
  Collective("all_to_all", group, where).run([&] {
    if (!parts.empty()) {
      first = parts[0];
      check_tensor("all_to_all", first, group, where);
    }
    const at::Tensor all = join_parts("all_to_all", parts, first, group, where);
    out = at::empty_like(all);
    group.all_to_all(bytes_of(all), bytes_of(out), timeout, where);
  });
  return rows_on(first.device(), out);
}

void send(const at::Tensor& data, int dst, const Group& group, Timeout timeout,
          std::source_location where) {
  Collective(Op::send, dst, group, where).run([&] {
    group.send(bytes_of(for_group("send", data, group, where)), dst, timeout, where);
  });
}

void recv(at::Tensor& data, int src, const Group& group, Timeout timeout,
          std::source_location where) {
  const at::NoGradGuard no_grad;
  at::Tensor dense;
  Collective(Op::recv, src, group, where).run([&] {
    dense = for_result("recv", data, group, where);
    group.recv(bytes_of(dense), src, timeout, where);
  });
  copy_back(dense, data);
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
      check_result("all_reduce_dict", tensor, group, where);
      (void)reduced_as("all_reduce_dict", tensor, op, group, where);
      entries.push_back({key, static_cast<std::size_t>(tensor.numel())});
    }
  });
  lockstep::detail::check_dicts(call, entries, op);
  std::vector<at::Tensor> tensors;
  for (const auto& [key, tensor] : dict) tensors.push_back(tensor);
  work_on_each("all_reduce_dict", tensors, group, where, [&](at::Tensor& tensor) {
    all_reduce(tensor, op, group, call.limit.timeout(), where);
  });
}

void all_reduce_params(const std::vector<at::Tensor>& params, bool coalesce, double bucket_size_mb,
                       ReduceOp op, const Group& group, Timeout timeout,
                       std::source_location where) {
  const at::NoGradGuard no_grad;
  const lockstep::detail::TimeLimit limit(timeout);  // of all its collectives together
  Collective("all_reduce_params", group, where).run([&] {
    for (const at::Tensor& param : params) {
      check_result("all_reduce_params", param, group, where);
      (void)reduced_as("all_reduce_params", param, op, group, where);
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
    const auto once = unique_tensors(params);
    const auto apart = without_shared_memory(once);
    for (at::Tensor param : apart) {
      if (!coalesce) {
        all_reduce(param, op, group, limit.timeout(), where);
        continue;
      }
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
    write_back_copies(apart, once);
  });
}

at::Device get_comm_device(const Group& /*group*/) { return at::kCPU; }

void detail::all_reduce_each(const std::vector<at::Tensor>& tensors, ReduceOp op,
                             const Group& group, Timeout timeout, std::source_location where) {
  work_on_each("all_reduce", tensors, group, where,
               [&](at::Tensor& tensor) { nn::all_reduce(tensor, op, group, timeout, where); });
}

void detail::reduce_each(const std::vector<at::Tensor>& tensors, int dst, ReduceOp op,
                         const Group& group, Timeout timeout, std::source_location where) {
  work_on_each("reduce", tensors, group, where,
               [&](at::Tensor& tensor) { nn::reduce(tensor, dst, op, group, timeout, where); });
}

void detail::separate(const char* operation, const std::vector<at::Tensor>& results,
                      TensorsOfTrees& parts, const Group& group, std::source_location where,
                      int src) {
  if (results.size() < 2) return;
  const Collective collective =
      src < 0 ? Collective(operation, group, where) : Collective(Op::recv, src, group, where);
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
  return Collective(operation, group, where).run([&] {
    check_n_parts(operation, parts.size(), group, where);
    TensorsOfTrees by_tensor(like.size());
    for (const auto& part : parts) {
      if (part.size() != like.size()) {
        throw UsageError(context_of(operation, group, where),
                         fmt::format("parts must hold the same tensors: got {} and {} of them",
                                     like.size(), part.size()));
      }
      for (std::size_t i = 0; i < part.size(); ++i) by_tensor[i].push_back(part[i]);
    }
    for (std::size_t i = 0; i < like.size(); ++i) {
      check_tensor(operation, like[i], group, where);
      check_parts(operation, by_tensor[i], like[i], group, where);
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
