#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>

#include "nn/python/backend.hpp"

// The operations with one tensor for all ranks' parts, and all_to_all.
namespace lockstep::python {

using c10d::OpType;

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

Ends ends_of(const at::Tensor& input, const at::Tensor& output, const ErrorContext& context) {
  Ends ends{.in = contiguous(input, context), .out = contiguous(output, context), .output = output};
  if (overlap(ends.in, ends.out)) ends.in = ends.in.clone();
  return ends;
}

}  // namespace

Backend::WorkResult Backend::gather_into(const Tensors& outputs, const Tensors& inputs, OpType type,
                                         const c10d::AllgatherOptions& options) {
  return call("lockstep:all_gather", type, options.asyncOp, options.timeout, inputs, outputs,
              [&](const ErrorContext& context) {
                std::vector<Ends> parts;
                for (std::size_t i = 0; i < std::max(inputs.size(), outputs.size()); ++i) {
                  check_sizes({"output", outputs.at(i)}, {"input", inputs.at(i)}, size_, context);
                  parts.push_back(ends_of(inputs[i], outputs[i], context));
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
  };
  return call("lockstep:reduce_scatter", type, options.asyncOp, options.timeout, inputs, outputs,
              [&](const ErrorContext& context) {
                std::vector<Part> parts;
                for (std::size_t i = 0; i < std::max(inputs.size(), outputs.size()); ++i) {
                  check_sizes({"input", inputs.at(i)}, {"output", outputs.at(i)}, size_, context);
                  Ends ends = ends_of(inputs[i], outputs[i], context);
                  const Reduction reduction = reduction_of(ends.in, options.reduceOp, context);
                  parts.push_back({.ends = std::move(ends), .reduction = reduction});
                }
                return [parts = std::move(parts), n = n_ranks()](const Group& group,
                                                                 const Site& site) {
                  for (const auto& [ends, reduction] : parts) {
                    const Elements& in = reduction.elements;
                    group.reduce_scatter(
                        in, {.data = ends.out.data_ptr(), .count = in.count / n, .dtype = in.dtype},
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
  return scatter_from(outputs, inputs, OpType::REDUCE_SCATTER_TENSOR_COALESCED, options);
}

Backend::WorkResult Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ReduceScatterOptions& options) {
  const bool is_even =
      inputs.size() == 1 &&
      std::all_of(inputs.front().begin(), inputs.front().end(), [&](const at::Tensor& part) {
        return part.sizes() == inputs.front().front().sizes();
      });
  const auto context_now = [&] { return context_of("reduce_scatter", python_line()); };
  if (inputs.size() != 1 || inputs.front().size() != n_ranks()) {
    throw UsageError(context_now(), fmt::format("takes one list of {} inputs", size_));
  }
  Tensors parts;
  for (const at::Tensor& part : inputs.front()) parts.push_back(contiguous(part, context_now()));
  const Block block = block_of(parts, Contents::needed);
  if (is_even) return scatter_from(outputs, {block.flat}, OpType::REDUCE_SCATTER, options);
  // Parts of different sizes: all of them, of which this rank keeps its own.
  return call("lockstep:all_reduce", OpType::REDUCE_SCATTER, options.asyncOp, options.timeout,
              inputs.front(), outputs, [&](const ErrorContext& context) {
                const at::Tensor output = only(outputs, context);
                const at::Tensor all = block.is_view ? block.flat.clone() : block.flat;
                const Reduction reduction = reduction_of(all, options.reduceOp, context);
                std::int64_t begin = 0;
                for (int r = 0; r < rank_; ++r) begin += parts[static_cast<std::size_t>(r)].numel();
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

/// Parts of different sizes travel in chunks of the largest.
void all_to_all_uneven(const Group& group, const std::byte* in, const Sizes& to, std::byte* out,
                       const Sizes& from, const Elements& kind, std::size_t per_element,
                       Timeout timeout, std::source_location where) {
  const auto all = exchange_sizes(group, to, from, timeout, where);
  std::int64_t largest = 0;
  std::int64_t smallest = all[0][0];
  for (const Sizes& sizes : all) {
    largest = std::max(largest, *std::ranges::max_element(sizes));
    smallest = std::min(smallest, *std::ranges::min_element(sizes));
  }
  const std::size_t n_bytes_of_element = size_of(kind.dtype) * per_element;
  const std::size_t chunk = static_cast<std::size_t>(largest) * n_bytes_of_element;
  const auto n = static_cast<std::size_t>(group.size());
  if (largest == smallest) {
    const std::size_t n_elements = chunk * n / size_of(kind.dtype);
    group.all_to_all({.data = in, .count = n_elements, .dtype = kind.dtype},
                     {.data = out, .count = n_elements, .dtype = kind.dtype}, timeout, where);
    return;
  }
  const auto sent = std::make_unique_for_overwrite<std::byte[]>(chunk * n);
  const auto received = std::make_unique_for_overwrite<std::byte[]>(chunk * n);
  for (std::size_t r = 0; r < n; ++r) {
    const std::size_t n_bytes = static_cast<std::size_t>(to[r]) * n_bytes_of_element;
    if (n_bytes > 0) std::memcpy(sent.get() + r * chunk, in, n_bytes);
    std::memset(sent.get() + r * chunk + n_bytes, 0, chunk - n_bytes);
    in += n_bytes;
  }
  const std::size_t count = chunk * n / size_of(kind.dtype);
  group.all_to_all({.data = sent.get(), .count = count, .dtype = kind.dtype},
                   {.data = received.get(), .count = count, .dtype = kind.dtype}, timeout, where);
  for (std::size_t r = 0; r < n; ++r) {
    const std::size_t n_bytes = static_cast<std::size_t>(from[r]) * n_bytes_of_element;
    if (n_bytes > 0) std::memcpy(out, received.get() + r * chunk, n_bytes);
    out += n_bytes;
  }
}

/// Elements of lockstep per element of the tensor: more than 1 for types that travel as bytes.
std::size_t per_element(const at::Tensor& tensor) {
  return tensor.itemsize() / size_of(elements_of(tensor).dtype);
}

/// The elements for each rank of a tensor that is split along its first dimension.
Sizes elements_by_rank(const at::Tensor& tensor, const Sizes& rows, std::size_t n_ranks,
                       const ErrorContext& context) {
  const std::int64_t n_rows = tensor.dim() == 0 ? 0 : tensor.size(0);
  const std::int64_t n_of_row = n_rows == 0 ? 0 : tensor.numel() / n_rows;
  std::int64_t sum = 0;
  Sizes sizes;
  for (const std::int64_t n : rows) {
    sum += n;
    sizes.push_back(n * n_of_row);
  }
  if (rows.size() != n_ranks || sum != n_rows) {
    throw UsageError(context,
                     fmt::format("split sizes for {} ranks of {} rows in all; the group has "
                                 "{} ranks, the tensor {} rows",
                                 rows.size(), sum, n_ranks, n_rows));
  }
  return sizes;
}

}  // namespace

Backend::WorkResult Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                           std::vector<std::int64_t>& output_sizes,
                                           std::vector<std::int64_t>& input_sizes,
                                           const c10d::AllToAllOptions& options) {
  return call("lockstep:all_to_all", OpType::ALLTOALL_BASE, options.asyncOp, options.timeout,
              {input}, {output}, [&](const ErrorContext& context) {
                at::Tensor in = contiguous(input, context);
                const at::Tensor out = contiguous(output, context);
                if (in.scalar_type() != out.scalar_type()) {
                  throw UsageError(context, "the input and the output differ in type");
                }
                if (overlap(in, out)) in = in.clone();
                const bool is_even = output_sizes.empty() && input_sizes.empty();
                const auto even = [&](const at::Tensor& tensor) {
                  const std::int64_t n_rows = tensor.dim() == 0 ? 0 : tensor.size(0);
                  if (n_rows % size_ != 0) {
                    throw UsageError(context, fmt::format("{} rows cannot be split among {} ranks",
                                                          n_rows, size_));
                  }
                  return Sizes(n_ranks(), n_rows / size_);
                };
                const Sizes to = elements_by_rank(in, input_sizes.empty() ? even(in) : input_sizes,
                                                  n_ranks(), context);
                const Sizes from = elements_by_rank(
                    out, output_sizes.empty() ? even(out) : output_sizes, n_ranks(), context);
                return [=, output = output](const Group& group, const Site& site) {
                  if (is_even) {
                    group.all_to_all(elements_of(in), elements_of(out), site.timeout, site.where);
                  } else {
                    all_to_all_uneven(group, static_cast<const std::byte*>(in.data_ptr()), to,
                                      static_cast<std::byte*>(out.data_ptr()), from,
                                      elements_of(in), per_element(in), site.timeout, site.where);
                  }
                  write_back(out, output);
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
                Tensors ins, outs;
                Sizes to, from;
                for (std::size_t r = 0; r < n_ranks(); ++r) {
                  if (inputs[r].scalar_type() != inputs[0].scalar_type() ||
                      outputs[r].scalar_type() != inputs[0].scalar_type()) {
                    throw UsageError(context, "the tensors differ in type");
                  }
                  ins.push_back(contiguous(inputs[r], context));
                  outs.push_back(contiguous(outputs[r], context));
                  to.push_back(inputs[r].numel());
                  from.push_back(outputs[r].numel());
                }
                return [=, tensors = outputs](const Group& group, const Site& site) {
                  Block in = block_of(ins, Contents::needed);
                  const Block out = block_of(outs, Contents::not_needed);
                  if (overlap(in.flat, out.flat)) in.flat = in.flat.clone();
                  all_to_all_uneven(group, static_cast<const std::byte*>(in.flat.data_ptr()), to,
                                    static_cast<std::byte*>(out.flat.data_ptr()), from,
                                    elements_of(in.flat), per_element(in.flat), site.timeout,
                                    site.where);
                  unpack(out, outs);
                  for (std::size_t r = 0; r < tensors.size(); ++r) write_back(outs[r], tensors[r]);
                };
              });
}

}  // namespace lockstep::python
