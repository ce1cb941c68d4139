#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "group/list_calls.hpp"
#include "nn/backend/backend.hpp"
#include "nn/backend/interpreter.hpp"
#include "nn/elements/dense.hpp"

// The operations with one tensor for all ranks' parts, all_to_all, and the sum of sparse tensors.
namespace lockstep::backend {

using c10d::OpType;
using internal::ListCalls;

namespace {

struct Ends {
  at::Tensor in, out;  // contiguous, without common memory
  at::Tensor output;   // the caller's
};

struct Side {
  const char* name;
  const at::Tensor& tensor;
};

void check_sizes(const Side& all_ranks, const Side& one_rank, int n_ranks,
                 const ErrorContext& context) {
  const at::Tensor& all = all_ranks.tensor;
  const at::Tensor& one = one_rank.tensor;
  if (all.numel() == one.numel() * n_ranks && all.scalar_type() == one.scalar_type()) return;
  throw UsageError(
      context,
      fmt::format("the {} has {} elements of {}, the {} {} of {}; it takes {} times the {}",
                  all_ranks.name, all.numel(), at::toString(all.scalar_type()), one_rank.name,
                  one.numel(), at::toString(one.scalar_type()), n_ranks, one_rank.name));
}

/// Input r of a list.
void check_part(const at::Tensor& part, std::size_t r, const at::Tensor& output,
                const ErrorContext& context) {
  if (part.numel() == output.numel() && part.scalar_type() == output.scalar_type()) return;
  throw UsageError(context, fmt::format("input {} has {} elements of {}, the output {} of {}", r,
                                        part.numel(), at::toString(part.scalar_type()),
                                        output.numel(), at::toString(output.scalar_type())));
}

/// written: by the whole call.
Ends ends_of(const at::Tensor& input, const at::Tensor& output,
             const std::vector<nn::MemoryRange>& written, const ErrorContext& context) {
  return {.in = apart_from(written, contiguous(input, context)),
          .out = contiguous_output(output, context),
          .output = output};
}

}  // namespace

Backend::WorkResult Backend::gather_into(const Tensors& outputs, const Tensors& inputs, OpType type,
                                         const c10d::AllgatherOptions& options) {
  return call("lockstep:all_gather", type, options.asyncOp, options.timeout, inputs, outputs,
              [&](const ErrorContext& context) {
                check_outputs_apart(outputs, context);
                const auto written = ranges_of(outputs);
                std::vector<Ends> parts;
                for (std::size_t i = 0; i < std::max(inputs.size(), outputs.size()); ++i) {
                  check_sizes({"output", outputs.at(i)}, {"input", inputs.at(i)}, size_, context);
                  parts.push_back(ends_of(inputs[i], outputs[i], written, context));
                }
                return [parts = std::move(parts)](const Group& group, const Site& site) {
                  for (const Ends& part : parts) {
                    group.all_gather(elements_of(part.in), elements_of(part.out), site.timeout,
                                     site.where);
                    write_back(part.out, part.output);
                  }
                };
              });
}

Backend::WorkResult Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::AllgatherOptions& options) {
  return gather_into({output}, {input}, OpType::_ALLGATHER_BASE, options);
}

Backend::WorkResult Backend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return gather_into(outputs, inputs, OpType::COALESCED, options);
}

Backend::WorkResult Backend::scatter_from(const Tensors& outputs, const Tensors& inputs,
                                          OpType type, const c10d::ReduceScatterOptions& options) {
  struct Part {
    Ends ends;
    Reduction reduction;  // of ends.in
    void* out;            // of ends.out
  };
  return call(
      "lockstep:reduce_scatter", type, options.asyncOp, options.timeout, inputs, outputs,
      [&](const ErrorContext& context) {
        check_outputs_apart(outputs, context);
        const auto written = ranges_of(outputs);
        std::vector<Part> parts;
        for (std::size_t i = 0; i < std::max(inputs.size(), outputs.size()); ++i) {
          check_sizes({"input", inputs.at(i)}, {"output", outputs.at(i)}, size_, context);
          Ends ends = ends_of(inputs[i], outputs[i], written, context);
          const Reduction reduction = reduction_of(ends.in, options.reduceOp, context);
          void* const out = ends.out.data_ptr();
          parts.push_back({.ends = std::move(ends), .reduction = reduction, .out = out});
        }
        return [parts = std::move(parts), n = n_ranks()](const Group& group, const Site& site) {
          for (const auto& [ends, reduction, out] : parts) {
            const Elements& in = reduction.elements;
            group.reduce_scatter(in, {.data = out, .count = in.count / n, .dtype = in.dtype},
                                 reduction.op, site.timeout, site.where);
            write_back(ends.out, ends.output);
          }
        };
      });
}

Backend::WorkResult Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::ReduceScatterOptions& options) {
  return scatter_from({output}, {input}, OpType::_REDUCE_SCATTER_BASE, options);
}

Backend::WorkResult Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return scatter_from(outputs, inputs, OpType::COALESCED, options);
}

Backend::WorkResult Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ReduceScatterOptions& options) {
  if (inputs.size() != 1 || inputs.front().size() != n_ranks()) {
    const ErrorContext context = context_of("reduce_scatter", interpreter().where());
    before_call("reduce_scatter", context.where, [&] {
      throw UsageError(context, fmt::format("takes one list of {} inputs", size_));
    });
  }
  const Tensors& parts = inputs.front();
  const bool is_even = std::ranges::all_of(
      parts, [&](const at::Tensor& part) { return part.numel() == parts.front().numel(); });
  return is_even ? scatter_even(outputs, parts, options) : scatter_uneven(outputs, parts, options);
}

Backend::WorkResult Backend::scatter_even(const Tensors& outputs, const Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) {
  return call("lockstep:reduce_scatter", OpType::REDUCE_SCATTER, options.asyncOp, options.timeout,
              inputs, outputs, [&](const ErrorContext& context) {
                const at::Tensor output = only(outputs, context);
                const at::Tensor out = contiguous_output(output, context);
                const Reduction reduction = reduction_of(out, options.reduceOp, context);
                Tensors ins;
                for (std::size_t r = 0; r < n_ranks(); ++r) {
                  check_part(inputs[r], r, output, context);
                  ins.push_back(apart_from(ranges_of(outputs), contiguous(inputs[r], context)));
                }
                std::vector<ConstElements> parts(ins.size(), reduction.elements);
                for (std::size_t r = 0; r < ins.size(); ++r) parts[r].data = ins[r].data_ptr();
                return [=, ins = std::move(ins)](const Group& group, const Site& site) {
                  ListCalls::reduce_scatter(group, parts, reduction.elements, reduction.op,
                                            site.timeout, site.where);
                  write_back(out, output);
                };
              });
}

/// All parts, of which this rank keeps its own.
Backend::WorkResult Backend::scatter_uneven(const Tensors& outputs, const Tensors& inputs,
                                            const c10d::ReduceScatterOptions& options) {
  return call("lockstep:all_reduce", OpType::REDUCE_SCATTER, options.asyncOp, options.timeout,
              inputs, outputs, [&](const ErrorContext& context) {
                const at::Tensor output = only(outputs, context);
                const auto own = static_cast<std::size_t>(rank_);
                check_part(inputs[own], own, output, context);
                check_output(output, context);
                const at::NoGradGuard no_grad;
                Tensors flat;
                std::int64_t begin = 0;
                for (std::size_t r = 0; r < n_ranks(); ++r) {
                  if (inputs[r].scalar_type() != output.scalar_type()) {
                    throw UsageError(context, "the tensors differ in type");
                  }
                  if (r < own) begin += inputs[r].numel();
                  flat.push_back(contiguous(inputs[r], context).view(-1));
                }
                const at::Tensor all = at::cat(flat);
                const Reduction reduction = reduction_of(all, options.reduceOp, context);
                return [=](const Group& group, const Site& site) {
                  group.all_reduce(reduction.elements, reduction.op, site.timeout, site.where);
                  write_back(all.narrow(0, begin, output.numel()).view(output.sizes()), output);
                };
              });
}

namespace {

using Sizes = std::vector<std::int64_t>;  // in elements, by rank

/// Every rank's sizes to send and to receive, which must agree.
std::vector<Sizes> exchange_sizes(const Group& group, const Sizes& to, const Sizes& from,
                                  Timeout timeout, std::source_location where) {
  const auto n = static_cast<std::size_t>(group.size());
  Sizes own(to);
  own.insert(own.end(), from.begin(), from.end());
  Sizes all(own.size() * n);
  group.all_gather({.data = own.data(), .count = own.size(), .dtype = DType::i64},
                   {.data = all.data(), .count = all.size(), .dtype = DType::i64}, timeout, where);
  std::vector<Sizes> sizes_to(n);
  for (std::size_t r = 0; r < n; ++r) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(r * own.size());
    sizes_to[r].assign(begin, begin + static_cast<std::ptrdiff_t>(n));
  }
  for (std::size_t src = 0; src < n; ++src) {
    for (std::size_t dst = 0; dst < n; ++dst) {
      const std::int64_t sent = sizes_to[src][dst];
      const std::int64_t received = all[dst * own.size() + n + src];
      if (sent == received) continue;
      throw UsageError(
          {.operation = "all_to_all", .group = group.name(), .rank = group.rank(), .where = where},
          fmt::format("rank {} sends {} elements to rank {}, which takes {}", src, sent, dst,
                      received));
    }
  }
  return sizes_to;
}

/// Parts of different sizes travel in chunks of the largest. n_bytes_each: of a tensor's element.
void all_to_all_lists(const Group& group, const std::vector<ConstElements>& ins,
                      const std::vector<Elements>& outs, std::size_t n_bytes_each, Timeout timeout,
                      std::source_location where) {
  const auto n = static_cast<std::size_t>(group.size());
  const DType dtype = ins.front().dtype;
  Sizes to, from;
  for (std::size_t r = 0; r < n; ++r) {
    to.push_back(static_cast<std::int64_t>(ins[r].n_bytes() / n_bytes_each));
    from.push_back(static_cast<std::int64_t>(outs[r].n_bytes() / n_bytes_each));
  }
  const auto all = exchange_sizes(group, to, from, timeout, where);
  std::int64_t largest = 0;
  std::int64_t smallest = all[0][0];
  for (const Sizes& sizes : all) {
    largest = std::max(largest, *std::ranges::max_element(sizes));
    smallest = std::min(smallest, *std::ranges::min_element(sizes));
  }
  if (largest == smallest) return ListCalls::all_to_all(group, ins, outs, timeout, where);
  const std::size_t chunk = static_cast<std::size_t>(largest) * n_bytes_each;
  const std::size_t count = chunk / size_of(dtype);
  const auto sent = std::make_unique_for_overwrite<std::byte[]>(chunk * n);
  const auto received = std::make_unique_for_overwrite<std::byte[]>(chunk * n);
  for (std::size_t r = 0; r < n; ++r) {
    const std::size_t n_bytes = ins[r].n_bytes();
    if (n_bytes > 0) std::memcpy(sent.get() + r * chunk, ins[r].data, n_bytes);
    std::memset(sent.get() + r * chunk + n_bytes, 0, chunk - n_bytes);
  }
  group.all_to_all({.data = sent.get(), .count = count * n, .dtype = dtype},
                   {.data = received.get(), .count = count * n, .dtype = dtype}, timeout, where);
  for (std::size_t r = 0; r < n; ++r) {
    if (outs[r].count > 0) std::memcpy(outs[r].data, received.get() + r * chunk, outs[r].n_bytes());
  }
}

/// The part for each rank of a contiguous tensor that is split along its first dimension. rows:
/// each rank's; empty: all the same.
template <class E>
std::vector<E> split_rows(const at::Tensor& tensor, Sizes rows, std::size_t n_ranks,
                          const ErrorContext& context) {
  const std::int64_t n_rows = tensor.dim() == 0 ? 0 : tensor.size(0);
  const auto n = static_cast<std::int64_t>(n_ranks);
  if (rows.empty()) {
    if (n_rows % n != 0) {
      throw UsageError(context,
                       fmt::format("{} rows cannot be split among {} ranks", n_rows, n_ranks));
    }
    rows.assign(n_ranks, n_rows / n);
  }
  const std::int64_t sum = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  if (rows.size() != n_ranks || sum != n_rows || std::ranges::min(rows) < 0) {
    throw UsageError(context,
                     fmt::format("split sizes {} for {} ranks of {} rows in all; the group has {} "
                                 "ranks, the tensor {} rows",
                                 fmt::join(rows, ", "), rows.size(), sum, n_ranks, n_rows));
  }
  const Elements all = elements_of(tensor);  // of types that travel as bytes: their bytes
  const std::size_t n_each = n_rows == 0 ? 0 : all.count / static_cast<std::size_t>(n_rows);
  auto* next = static_cast<std::byte*>(all.data);
  std::vector<E> parts;
  for (const std::int64_t n_rows_of_part : rows) {
    const std::size_t count = static_cast<std::size_t>(n_rows_of_part) * n_each;
    const Elements part{.data = next, .count = count, .dtype = all.dtype};
    parts.push_back(part);
    next += part.n_bytes();
  }
  return parts;
}

}  // namespace

Backend::WorkResult Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                           std::vector<std::int64_t>& output_sizes,
                                           std::vector<std::int64_t>& input_sizes,
                                           const c10d::AllToAllOptions& options) {
  return call(
      "lockstep:all_to_all", OpType::ALLTOALL_BASE, options.asyncOp, options.timeout, {input},
      {output}, [&](const ErrorContext& context) {
        if (input.scalar_type() != output.scalar_type()) {
          throw UsageError(context, "the input and the output differ in type");
        }
        const Ends ends = ends_of(input, output, ranges_of({output}), context);
        const auto ins = split_rows<ConstElements>(ends.in, input_sizes, n_ranks(), context);
        const auto outs = split_rows<Elements>(ends.out, output_sizes, n_ranks(), context);
        const bool is_even = output_sizes.empty() && input_sizes.empty();
        return [=](const Group& group, const Site& site) {
          if (is_even) {
            group.all_to_all(elements_of(ends.in), elements_of(ends.out), site.timeout, site.where);
          } else {
            all_to_all_lists(group, ins, outs, ends.in.itemsize(), site.timeout, site.where);
          }
          write_back(ends.out, ends.output);
        };
      });
}

Backend::WorkResult Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllToAllOptions& options) {
  return call("lockstep:all_to_all", OpType::ALLTOALL, options.asyncOp, options.timeout, inputs,
              outputs, [&](const ErrorContext& context) {
                if (inputs.size() != n_ranks() || outputs.size() != n_ranks()) {
                  throw UsageError(context, fmt::format("{} inputs and {} outputs for {} ranks",
                                                        inputs.size(), outputs.size(), size_));
                }
                check_outputs_apart(outputs, context);
                Tensors ins, outs;
                for (std::size_t r = 0; r < n_ranks(); ++r) {
                  if (inputs[r].scalar_type() != inputs[0].scalar_type() ||
                      outputs[r].scalar_type() != inputs[0].scalar_type()) {
                    throw UsageError(context, "the tensors differ in type");
                  }
                  ins.push_back(contiguous(inputs[r], context));
                  outs.push_back(contiguous_output(outputs[r], context));
                }
                for (at::Tensor& in : ins) in = apart_from(ranges_of(outputs), in);
                return [=, tensors = outputs](const Group& group, const Site& site) {
                  all_to_all_lists(group, elements_of_each<ConstElements>(ins),
                                   elements_of_each(outs), ins.front().itemsize(), site.timeout,
                                   site.where);
                  for (std::size_t r = 0; r < tensors.size(); ++r) write_back(outs[r], tensors[r]);
                };
              });
}

namespace {

/// Every rank's rows, in rank order; their number may differ.
at::Tensor gather_rows(const Group& group, const at::Tensor& rows,
                       const std::vector<std::int64_t>& n_rows, Timeout timeout,
                       std::source_location where) {
  const std::int64_t n_all = std::accumulate(n_rows.begin(), n_rows.end(), std::int64_t{0});
  auto sizes = rows.sizes().vec();
  sizes.front() = n_all;
  const at::Tensor all = at::empty(sizes, rows.options());
  const Elements out = elements_of(all);
  std::vector<std::size_t> counts;
  for (const std::int64_t n : n_rows) {
    counts.push_back(
        n_all == 0 ? 0 : out.count / static_cast<std::size_t>(n_all) * static_cast<std::size_t>(n));
  }
  group.all_gather(elements_of(rows), out, counts, timeout, where);
  return all;
}

}  // namespace

Backend::WorkResult Backend::allreduce_sparse(Tensors& tensors,
                                              const c10d::AllreduceOptions& options) {
  return call(
      "lockstep:all_reduce", c10d::OpType::_ALLREDUCE_SPARSE, options.asyncOp, options.timeout,
      tensors, tensors, [&](const ErrorContext& context) {
        const at::Tensor tensor = only(tensors, context);
        if (!tensor.is_sparse() || !tensor.device().is_cpu()) {
          throw UsageError(context, "takes a sparse COO tensor of the CPU");
        }
        if (options.reduceOp.op_ != c10d::ReduceOp::SUM) {
          throw UsageError(context, "sparse tensors are reduced by SUM only");
        }
        return [tensor](const Group& group, const Site& site) {
          const at::NoGradGuard no_grad;
          const at::Tensor in = tensor.coalesce();
          const at::Tensor indices = nn::dense(in.indices().t());
          const at::Tensor values = nn::dense(in.values());
          const std::int64_t n_own = values.size(0);
          std::vector<std::int64_t> n_rows(static_cast<std::size_t>(group.size()));
          group.all_gather({.data = &n_own, .count = 1, .dtype = DType::i64},
                           {.data = n_rows.data(), .count = n_rows.size(), .dtype = DType::i64},
                           site.timeout, site.where);
          const at::Tensor all_indices =
              gather_rows(group, indices, n_rows, site.timeout, site.where);
          const at::Tensor all_values =
              gather_rows(group, values, n_rows, site.timeout, site.where);
          at::Tensor(tensor).copy_(
              at::sparse_coo_tensor(all_indices.t(), all_values, tensor.sizes()).coalesce());
        };
      });
}

}  // namespace lockstep::backend
