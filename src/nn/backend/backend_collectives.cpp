#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "base/bytes.hpp"
#include "nn/backend/backend.hpp"
#include "nn/elements/dense.hpp"
#include "nn/elements/elements.hpp"

// c10d's collectives as TensorCalls, and those that are more than one of these.
namespace lockstep::backend {

using c10d::OpType;
using nn::TensorCall;
using TensorCalls = std::vector<TensorCall>;

namespace {

/// The calls that c10d coalesces: of outputs[i] and inputs[i].
TensorCalls paired(const TensorCall& like, const Tensors& outputs, const Tensors& inputs,
                   const ErrorContext& context) {
  if (outputs.size() != inputs.size()) {
    throw UsageError(context,
                     fmt::format("{} outputs for {} inputs", outputs.size(), inputs.size()));
  }
  TensorCalls calls(outputs.size(), like);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    calls[i].ins = {inputs[i]};
    calls[i].outs = {outputs[i]};
  }
  return calls;
}

/// A list, which must have one element for each rank. name: of these.
template <class T>
const std::vector<T>& one_each(const char* name, const std::vector<T>& list, const Group& group,
                               const ErrorContext& context) {
  if (list.size() == static_cast<std::size_t>(group.size())) return list;
  throw UsageError(context, fmt::format("{} {} for {} ranks", list.size(), name, group.size()));
}

}  // namespace

Backend::WorkResult Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return call(
      {"lockstep:broadcast", OpType::BROADCAST, options.asyncOp, options.timeout, tensors, tensors},
      [&](const ErrorContext& context) {
        return step_of({.op = Op::broadcast,
                        .root = rank_of(options.rootRank),
                        .outs = {only(tensors, context)}},
                       context);
      });
}

Backend::WorkResult Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors.front().is_sparse()) return allreduce_sparse(tensors, options);
  return call({"lockstep:all_reduce", OpType::ALLREDUCE, options.asyncOp, options.timeout, tensors,
               tensors},
              [&](const ErrorContext& context) {
                return step_of({.op = Op::all_reduce,
                                .reduce = reduction_of(options.reduceOp, context),
                                .outs = {only(tensors, context)}},
                               context);
              });
}

Backend::WorkResult Backend::allreduce_coalesced(Tensors& tensors,
                                                 const c10d::AllreduceCoalescedOptions& options) {
  return call({"lockstep:all_reduce", OpType::ALLREDUCE_COALESCED, options.asyncOp, options.timeout,
               tensors, tensors},
              [&](const ErrorContext& context) {
                TensorCalls calls(
                    tensors.size(),
                    {.op = Op::all_reduce, .reduce = reduction_of(options.reduceOp, context)});
                for (std::size_t i = 0; i < calls.size(); ++i) calls[i].outs = {tensors[i]};
                return step_of(std::move(calls), context);
              });
}

Backend::WorkResult Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return call(
      {"lockstep:reduce", OpType::REDUCE, options.asyncOp, options.timeout, tensors, tensors},
      [&](const ErrorContext& context) {
        return step_of({.op = Op::reduce,
                        .reduce = reduction_of(options.reduceOp, context),
                        .root = rank_of(options.rootRank),
                        .outs = {only(tensors, context)}},
                       context);
      });
}

Backend::WorkResult Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) {
  return call({"lockstep:all_gather", OpType::ALLGATHER, options.asyncOp, options.timeout, inputs,
               outputs.empty() ? Tensors{} : outputs.front()},
              [&](const ErrorContext& context) {
                return step_of(
                    {.op = Op::all_gather,
                     .ins = {only(inputs, context)},
                     .outs = one_each("outputs", only_list(outputs, context), group(), context)},
                    context);
              });
}

Backend::WorkResult Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& options) {
  Tensors results;
  for (const Tensors& list : outputs) results.insert(results.end(), list.begin(), list.end());
  // outputs: for each rank its tensors, or for each input the ranks' tensors.
  return call({"lockstep:all_gather", OpType::ALLGATHER_COALESCED, options.asyncOp, options.timeout,
               inputs, results},
              [&](const ErrorContext& context) {
                one_each("lists of outputs", outputs, group(), context);
                TensorCalls calls;
                for (const at::Tensor& input : inputs) {
                  calls.push_back({.op = Op::all_gather, .ins = {input}});
                }
                for (const Tensors& of_rank : outputs) {
                  if (of_rank.size() != inputs.size()) {
                    throw UsageError(context, fmt::format("{} outputs of a rank for {} inputs",
                                                          of_rank.size(), inputs.size()));
                  }
                  for (std::size_t i = 0; i < inputs.size(); ++i) {
                    calls[i].outs.push_back(of_rank[i]);
                  }
                }
                return step_of(std::move(calls), context);
              });
}

Backend::WorkResult Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::AllgatherOptions& options) {
  return call({"lockstep:all_gather",
               OpType::_ALLGATHER_BASE,
               options.asyncOp,
               options.timeout,
               {input},
               {output}},
              [&](const ErrorContext& context) {
                return step_of({.op = Op::all_gather, .ins = {input}, .outs = {output}}, context);
              });
}

Backend::WorkResult Backend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return call(
      {"lockstep:all_gather", OpType::COALESCED, options.asyncOp, options.timeout, inputs, outputs},
      [&](const ErrorContext& context) {
        return step_of(paired({.op = Op::all_gather}, outputs, inputs, context), context);
      });
}

Backend::WorkResult Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::GatherOptions& options) {
  return call({"lockstep:gather", OpType::GATHER, options.asyncOp, options.timeout, inputs,
               outputs.empty() ? Tensors{} : outputs.front()},
              [&](const ErrorContext& context) {
                const int root = rank_of(options.rootRank);
                TensorCall call{.op = Op::gather, .root = root, .ins = {only(inputs, context)}};
                if (rank_ == root) {
                  call.outs = one_each("outputs", only_list(outputs, context), group(), context);
                } else if (!outputs.empty()) {
                  throw UsageError(context, "only the destination takes outputs");
                }
                return step_of(std::move(call), context);
              });
}

Backend::WorkResult Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ScatterOptions& options) {
  return call({"lockstep:scatter", OpType::SCATTER, options.asyncOp, options.timeout,
               inputs.empty() ? outputs : inputs.front(), outputs},
              [&](const ErrorContext& context) {
                const int root = rank_of(options.rootRank);
                TensorCall call{.op = Op::scatter, .root = root, .outs = {only(outputs, context)}};
                if (rank_ == root) {
                  call.ins = one_each("inputs", only_list(inputs, context), group(), context);
                } else if (!inputs.empty()) {
                  throw UsageError(context, "only the source takes inputs");
                }
                return step_of(std::move(call), context);
              });
}

Backend::WorkResult Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::ReduceScatterOptions& options) {
  return call({"lockstep:reduce_scatter",
               OpType::_REDUCE_SCATTER_BASE,
               options.asyncOp,
               options.timeout,
               {input},
               {output}},
              [&](const ErrorContext& context) {
                return step_of({.op = Op::reduce_scatter,
                                .reduce = reduction_of(options.reduceOp, context),
                                .ins = {input},
                                .outs = {output}},
                               context);
              });
}

Backend::WorkResult Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return call({"lockstep:reduce_scatter", OpType::COALESCED, options.asyncOp, options.timeout,
               inputs, outputs},
              [&](const ErrorContext& context) {
                return step_of(paired({.op = Op::reduce_scatter,
                                       .reduce = reduction_of(options.reduceOp, context)},
                                      outputs, inputs, context),
                               context);
              });
}

Backend::WorkResult Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ReduceScatterOptions& options) {
  const Tensors parts = inputs.empty() ? Tensors() : inputs.front();
  const bool is_even = std::ranges::all_of(
      parts, [&](const at::Tensor& part) { return part.numel() == parts.front().numel(); });
  return call({is_even ? "lockstep:reduce_scatter" : "lockstep:all_reduce", OpType::REDUCE_SCATTER,
               options.asyncOp, options.timeout, parts, outputs},
              [&](const ErrorContext& context) {
                const TensorCall call{
                    .op = Op::reduce_scatter,
                    .reduce = reduction_of(options.reduceOp, context),
                    .ins = one_each("inputs", only_list(inputs, context), group(), context),
                    .outs = {only(outputs, context)}};
                return is_even ? step_of(call, context) : step_of_uneven_parts(call, context);
              });
}

Backend::Step Backend::step_of_uneven_parts(const TensorCall& call,
                                            const ErrorContext& context) const {
  const at::NoGradGuard no_grad;
  nn::check_tensors(call.ins, call.outs, /*are_results=*/true, nn::kOfC10d, context);
  const at::Tensor output = call.outs.front();
  const auto own = static_cast<std::size_t>(rank_);
  Tensors flat;
  std::int64_t begin = 0;
  for (std::size_t r = 0; r < call.ins.size(); ++r) {
    const at::Tensor& in = call.ins[r];
    if (r < own) begin += in.numel();
    flat.push_back(nn::dense(in).view(-1));
  }
  if (flat[own].numel() != output.numel()) {
    throw UsageError(context, fmt::format("input {} has {} elements, the output {}", own,
                                          flat[own].numel(), output.numel()));
  }
  const at::Tensor all = at::cat(flat);
  const auto of_all = std::make_shared<nn::PreparedCall>(
      TensorCall{.op = Op::all_reduce, .reduce = call.reduce, .outs = {all}}, nn::kOfC10d, group(),
      context);
  return [=, this](Timeout limit) {
    of_all->run(group(), limit);
    nn::write_back(all.narrow(0, begin, output.numel()).view(output.sizes()), output);
  };
}

namespace {

using Sizes = std::vector<std::int64_t>;  // in elements, by rank

Sizes sizes_of(const Tensors& tensors) {
  Sizes sizes;
  for (const at::Tensor& tensor : tensors) sizes.push_back(tensor.numel());
  return sizes;
}

/// The largest and the smallest size that any rank sends to another. Every rank's sizes to send
/// and to receive must agree.
std::pair<std::int64_t, std::int64_t> agree_on_sizes(const Group& group, const Sizes& to,
                                                     const Sizes& from, Timeout timeout,
                                                     const ErrorContext& context) {
  const auto n = static_cast<std::size_t>(group.size());
  Sizes own(to);
  own.insert(own.end(), from.begin(), from.end());
  Sizes all(own.size() * n);
  group.all_gather({.data = own.data(), .count = own.size(), .dtype = DType::i64},
                   {.data = all.data(), .count = all.size(), .dtype = DType::i64}, timeout,
                   context.where);
  for (std::size_t src = 0; src < n; ++src) {
    for (std::size_t dst = 0; dst < n; ++dst) {
      const std::int64_t sent = all[src * own.size() + dst];
      const std::int64_t received = all[dst * own.size() + n + src];
      if (sent == received) continue;
      throw UsageError(context, fmt::format("rank {} sends {} elements to rank {}, which takes {}",
                                            src, sent, dst, received));
    }
  }
  return {std::ranges::max(all), std::ranges::min(all)};
}

/// Parts whose sizes may differ travel as parts of the largest size. All are dense, and outs apart.
void all_to_all_lists(const TensorCall& call, const Group& group, Timeout timeout,
                      const ErrorContext& context) {
  const auto run = [&](TensorCall of_equal) {
    const nn::PreparedCall prepared(std::move(of_equal), nn::kOfC10d, group, context);
    prepared.run(group, timeout);
    prepared.write_back();
  };
  const auto [largest, smallest] =
      agree_on_sizes(group, sizes_of(call.ins), sizes_of(call.outs), timeout, context);
  if (largest == smallest) return run(call);
  const at::NoGradGuard no_grad;
  const auto n_bytes = static_cast<std::size_t>(largest) * call.ins[0].itemsize();
  // Bytes, because not all types can be set to zero.
  const at::Tensor sent = at::zeros({group.size(), static_cast<std::int64_t>(n_bytes)}, at::kByte);
  const at::Tensor received = at::empty_like(sent);
  const auto row_of = [n_bytes](const at::Tensor& rows, std::size_t r) {
    return rows.data_ptr<std::uint8_t>() + r * n_bytes;
  };
  for (std::size_t r = 0; r < call.ins.size(); ++r) {
    const at::Tensor own = nn::dense(call.ins[r]);
    base::copy_bytes(row_of(sent, r), own.data_ptr(), own.nbytes());
  }
  run({.op = Op::all_to_all, .ins = {sent}, .outs = {received}});
  for (std::size_t r = 0; r < call.outs.size(); ++r) {
    const at::Tensor own = nn::dense(call.outs[r]);
    base::copy_bytes(own.data_ptr(), row_of(received, r), own.nbytes());
    nn::write_back(own, call.outs[r]);
  }
}

/// How many rows each rank has of a tensor that is split along its first dimension. rows: that is
/// given; empty: all the same.
Sizes checked_rows(const at::Tensor& tensor, const Sizes& rows, std::int64_t n_ranks,
                   const ErrorContext& context) {
  if (tensor.dim() == 0) {
    if (n_ranks == 1 && rows.empty()) return {1};
    throw UsageError(context, fmt::format("a tensor without dimensions cannot be split among {} "
                                          "ranks",
                                          n_ranks));
  }
  const std::int64_t n_rows = tensor.size(0);
  if (rows.empty()) {
    if (n_rows % n_ranks == 0) return Sizes(static_cast<std::size_t>(n_ranks), n_rows / n_ranks);
    throw UsageError(context,
                     fmt::format("{} rows cannot be split among {} ranks", n_rows, n_ranks));
  }
  const std::int64_t sum = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  if (static_cast<std::int64_t>(rows.size()) != n_ranks || sum != n_rows ||
      std::ranges::min(rows) < 0) {
    throw UsageError(context,
                     fmt::format("split sizes {} for {} ranks of {} rows in all; the group has {} "
                                 "ranks, the tensor {} rows",
                                 fmt::join(rows, ", "), rows.size(), sum, n_ranks, n_rows));
  }
  return rows;
}

}  // namespace

Backend::WorkResult Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                           std::vector<std::int64_t>& output_sizes,
                                           std::vector<std::int64_t>& input_sizes,
                                           const c10d::AllToAllOptions& options) {
  return call(
      {"lockstep:all_to_all",
       OpType::ALLTOALL_BASE,
       options.asyncOp,
       options.timeout,
       {input},
       {output}},
      [&](const ErrorContext& context) {
        for (const at::Tensor& tensor : {input, output}) {
          nn::check_tensor(tensor, nn::kOfC10d, context);
        }
        const Sizes sent = checked_rows(input, input_sizes, size_, context);
        const Sizes received = checked_rows(output, output_sizes, size_, context);
        if (input_sizes.empty() && output_sizes.empty()) {
          return step_of({.op = Op::all_to_all, .ins = {input}, .outs = {output}}, context);
        }
        const at::NoGradGuard no_grad;
        const auto parts = [](const at::Tensor& tensor, const Sizes& rows) {
          return tensor.dim() == 0 ? Tensors{tensor} : tensor.split_with_sizes(rows);
        };
        return step_of_lists(
            {.op = Op::all_to_all, .ins = parts(input, sent), .outs = parts(output, received)},
            context);
      });
}

Backend::WorkResult Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllToAllOptions& options) {
  return call(
      {"lockstep:all_to_all", OpType::ALLTOALL, options.asyncOp, options.timeout, inputs, outputs},
      [&](const ErrorContext& context) {
        return step_of_lists({.op = Op::all_to_all,
                              .ins = one_each("inputs", inputs, group(), context),
                              .outs = one_each("outputs", outputs, group(), context)},
                             context);
      });
}

Backend::Step Backend::step_of_lists(const TensorCall& call, const ErrorContext& context) const {
  nn::check_tensors(call.ins, call.outs, /*are_results=*/true, nn::kOfC10d, context);
  return [this, call, context](Timeout limit) { all_to_all_lists(call, group(), limit, context); };
}

Backend::WorkResult Backend::allreduce_sparse(Tensors& tensors,
                                              const c10d::AllreduceOptions& options) {
  return call({"lockstep:all_reduce", OpType::_ALLREDUCE_SPARSE, options.asyncOp, options.timeout,
               tensors, tensors},
              [&](const ErrorContext& context) -> Step {
                const at::Tensor tensor = only(tensors, context);
                if (!tensor.is_sparse() || !tensor.device().is_cpu()) {
                  throw UsageError(context, "takes a sparse COO tensor of the CPU");
                }
                if (options.reduceOp.op_ != c10d::ReduceOp::SUM) {
                  throw UsageError(context, "sparse tensors are reduced by SUM only");
                }
                return [this, tensor, context](Timeout limit) {
                  const at::NoGradGuard no_grad;
                  at::Tensor(tensor).copy_(nn::all_reduce_sparse(tensor, /*divisor=*/1, nn::kOfC10d,
                                                                 group(), limit, context));
                };
              });
}

}  // namespace lockstep::backend
