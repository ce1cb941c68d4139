#include "nn/tensors/tensor_call.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <lockstep/detail/time_limit.hpp>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "group/argument_checks.hpp"
#include "group/native_engine.hpp"
#include "nn/elements/elements.hpp"
#include "nn/error.hpp"
#include "record/signature.hpp"

namespace lockstep::nn {
namespace {

bool is_in_place(Op op) { return op == Op::all_reduce || op == Op::reduce || op == Op::broadcast; }
/// Whether each rank gives a part for every rank, or gets one from every rank.
bool has_parts_in(Op op) {
  return op == Op::scatter || op == Op::reduce_scatter || op == Op::all_to_all;
}
bool has_parts_out(Op op) {
  return op == Op::all_gather || op == Op::gather || op == Op::all_to_all;
}
/// Whether the rank gets a result.
bool gets_result(Op op, bool is_root) {
  switch (op) {
    case Op::reduce:
    case Op::gather: return is_root;
    case Op::broadcast: return !is_root;
    case Op::send: return false;
    default: return true;
  }
}

ReduceOp op_of_bool(ReduceOp op) {
  if (op == ReduceOp::sum || op == ReduceOp::max) return ReduceOp::bor;
  if (op == ReduceOp::product || op == ReduceOp::min) return ReduceOp::band;
  return op;
}

/// How a group moves elements: of types that lockstep lacks, their bytes.
ReducedAs moved_as(const at::Tensor& tensor) {
  if (const auto dtype = dtype_of(tensor.scalar_type())) return {.dtype = *dtype, .n_parts = 1};
  return {.dtype = DType::u8, .n_parts = tensor.itemsize()};
}

/// Throws UsageError if the group cannot reduce so.
ReducedAs checked_reduction(at::ScalarType type, ReduceOp op, const ErrorContext& context) {
  const auto as = reduced_as(type, op);
  if (!as) {
    const bool has_sum = c10::isComplexType(type);
    throw UsageError(context, fmt::format("cannot reduce a tensor of {} by {}; convert it to {}{}",
                                          c10::toString(type), name_of(op), kReducible,
                                          has_sum ? ", or use sum or mean" : ""));
  }
  // Here, because a call that is refused does not wait for asynchronous ones before it.
  if (!can_reduce(op, as->dtype)) {
    throw UsageError(context, internal::why_no_reduction(op, as->dtype));
  }
  return *as;
}

/// Dense memory on the CPU with the tensor's values: its own, or a copy.
at::Tensor with_values(const at::Tensor& tensor, const Rules& rules) {
  if (!tensor.is_cpu()) return dense(tensor.cpu());
  return dense(rules.keeps_memory ? tensor.detach() : tensor);
}
/// The same for a result.
at::Tensor for_result(const at::Tensor& tensor, const Rules& rules) {
  if (tensor.is_cpu() && is_dense(tensor)) return rules.keeps_memory ? tensor.detach() : tensor;
  return at::empty_like(tensor, at::TensorOptions(at::kCPU), at::MemoryFormat::Contiguous);
}

at::Tensor new_rows(const at::Tensor& row, int n_ranks) {
  std::vector<std::int64_t> sizes{n_ranks};
  sizes.insert(sizes.end(), row.sizes().begin(), row.sizes().end());
  return at::empty(sizes, row.options().device(at::kCPU).requires_grad(false));
}

void check_root(const TensorCall& call, const Group& group, const ErrorContext& context) {
  const bool is_dst = call.op == Op::reduce || call.op == Op::gather;
  if (!is_dst && call.op != Op::broadcast && call.op != Op::scatter) return;
  const std::string text = why_no_rank(is_dst ? "dst" : "src", call.root, group);
  if (!text.empty()) throw UsageError(context, text);
}

/// The parts of all ranks, of which each has n_each elements; 0: those of a list may differ.
void check_sizes(const char* name, const Tensors& parts, std::int64_t n_each, const Group& group,
                 const ErrorContext& context, bool may_differ = false) {
  const auto n = static_cast<std::size_t>(group.size());
  if (parts.size() != 1 && parts.size() != n) {
    throw UsageError(context, fmt::format("{} {}s for {} ranks", parts.size(), name, group.size()));
  }
  if (parts.size() == 1 && parts[0].numel() != n_each * group.size()) {
    throw UsageError(
        context, fmt::format("the {} has {} elements; it takes {}, {} for each of {} ranks", name,
                             parts[0].numel(), n_each * group.size(), n_each, group.size()));
  }
  for (std::size_t r = 0; r < parts.size() && n > 1 && parts.size() == n; ++r) {
    const bool may_this = may_differ && r != static_cast<std::size_t>(group.rank());
    if (may_this || parts[r].numel() == n_each) continue;
    throw UsageError(context, fmt::format("{} {} has {} elements, expected {}", name, r,
                                          parts[r].numel(), n_each));
  }
}

void check_apart(const Tensors& results, const ErrorContext& context) {
  if (const auto shared = find_shared_results(results)) {
    throw UsageError(context, fmt::format("outputs {} and {} share memory; give each its own",
                                          shared->first, shared->second));
  }
}

}  // namespace

PreparedCall::PreparedCall(TensorCall call, const Rules& rules, const Group& group,
                           const ErrorContext& context, const std::vector<MemoryRange>& written)
    : rules_(rules), outs_(std::move(call.outs)) {
  const at::NoGradGuard no_grad;
  check_root(call, group, context);
  const Op op = call.op;
  is_written_ = gets_result(op, group.rank() == call.root);
  check_tensors(call.ins, outs_, is_written_ || rules.refuses_alike, rules, context);
  const Tensors& some = outs_.empty() ? call.ins : outs_;
  if (has_parts_in(op) && rules.are_parts_alike &&
      (op != Op::scatter || group.rank() == call.root)) {
    check_parts(call.ins, some.empty() ? at::Tensor() : some.front(), group, rules, context);
  }
  if (!call.ins.empty()) device_ = call.ins.front().device();
  if (outs_.empty() && is_written_) {
    outs_.push_back(new_rows(call.ins.front(), group.size()));
  }
  for (const at::Tensor& out : outs_) {
    own_outs_.push_back(nn::is_in_place(op) ? with_values(out, rules) : for_result(out, rules));
  }
  for (const at::Tensor& in : call.ins) {
    at::Tensor own = with_values(in, rules);
    const MemoryRange range(own);
    const auto overlaps = [&](const MemoryRange& result) { return range.overlaps(result); };
    const auto range_of = [](const at::Tensor& out) { return MemoryRange(out); };
    const bool is_written =
        std::ranges::any_of(outs_, overlaps, range_of) || std::ranges::any_of(written, overlaps);
    ins_.push_back(is_written ? own.clone() : std::move(own));
  }
  make_call(call, group, context);
}

void PreparedCall::make_call(const TensorCall& call, const Group& group,
                             const ErrorContext& context) {
  const Op op = call.op;
  for (const Tensors* const tensors : {&ins_, &own_outs_}) {
    for (const at::Tensor& tensor : *tensors) {
      if (tensor.numel() == 0 || tensor.data_ptr() != nullptr) continue;
      throw UsageError(context, fmt::format("a tensor of {} elements has no memory: its storage "
                                            "was freed",
                                            tensor.numel()));
    }
  }
  // One rank's part.
  const bool is_out = ins_.empty() || op == Op::scatter || op == Op::reduce_scatter;
  const Tensors& of_rank = is_out ? own_outs_ : ins_;
  const auto n = static_cast<std::size_t>(group.size());
  std::int64_t n_each = of_rank.front().numel();
  if (op == Op::all_to_all && ins_.size() == 1) n_each /= group.size();
  if (has_parts_in(op) && !ins_.empty()) check_sizes("input", ins_, n_each, group, context);
  if (has_parts_out(op) && !outs_.empty()) {
    check_sizes("output", own_outs_, n_each, group, context, op == Op::all_gather);
  }
  const at::Tensor& any = of_rank.front();
  const ReduceOp reduce = rules_.reduces_bool_as_or && any.scalar_type() == at::kBool
                              ? op_of_bool(call.reduce)
                              : call.reduce;
  const ReducedAs as = internal::is_reduction(op)
                           ? checked_reduction(any.scalar_type(), reduce, context)
                           : moved_as(any);
  call_ = {.op = op,
           .dtype = as.dtype,
           .reduce = reduce,
           .root = call.root,
           .count = static_cast<std::size_t>(n_each) * as.n_parts,
           .where = context.where};
  const auto is_list = [n](const Tensors& tensors) { return n > 1 && tensors.size() == n; };
  if (is_list(ins_)) {
    for (const at::Tensor& in : ins_) in_addresses_.push_back(in.data_ptr());
    call_.ins = in_addresses_;
  } else if (!ins_.empty()) {
    call_.in = ins_.front().data_ptr();
  }
  if (is_list(own_outs_)) {
    for (const at::Tensor& out : own_outs_) {
      out_addresses_.push_back(out.data_ptr());
      counts_.push_back(static_cast<std::size_t>(out.numel()) * as.n_parts);
    }
    call_.outs = out_addresses_;
    // As the call of ranks that give one tensor, if it can be one.
    const bool is_even =
        std::ranges::adjacent_find(counts_, std::not_equal_to<>()) == counts_.end();
    if (!is_even) call_.counts = counts_;
  } else if (!own_outs_.empty()) {
    call_.out = own_outs_.front().data_ptr();
  }
  if (nn::is_in_place(op)) call_.in = call_.out;
}

void PreparedCall::run(const Group& group, Timeout timeout) const {
  internal::NativeGroup::run(group, call_, timeout);
}

Work PreparedCall::post(const Group& group, Timeout timeout) const {
  return internal::NativeGroup::post(group, call_, timeout);
}

void PreparedCall::write_back() const {
  if (!is_written_) return;
  for (std::size_t i = 0; i < outs_.size(); ++i) {
    const at::Tensor& out = outs_[i];
    const bool is_own = own_outs_[i].data_ptr() == out.data_ptr();
    nn::write_back(own_outs_[i], out);
    if (is_own && rules_.tells_autograd && !out.is_inference()) {
      out.unsafeGetTensorImpl()->bump_version();
    }
  }
}

Tensors PreparedCall::rows() const {
  return outs_.empty() ? Tensors() : outs_.front().to(device_).unbind();
}

void PreparedCall::set_apart() {
  own_outs_.front() = own_outs_.front().clone();
  call_.in = call_.out = own_outs_.front().data_ptr();
}

PreparedCalls::PreparedCalls(std::vector<TensorCall> calls, const Rules& rules, const Group& group,
                             const ErrorContext& context) {
  Tensors results;
  for (const TensorCall& call : calls) {
    if (!is_in_place(call.op)) results.insert(results.end(), call.outs.begin(), call.outs.end());
  }
  check_apart(results, context);
  const std::vector<MemoryRange> written(results.begin(), results.end());
  calls_.reserve(calls.size());
  for (TensorCall& call : calls) {
    calls_.emplace_back(std::move(call), rules, group, context, written);
  }
}

void PreparedCalls::run(const Group& group, Timeout timeout,
                        const lockstep::detail::TimeLimit* of_all) {
  if (calls_.size() > 1 && calls_.front().is_in_place()) {
    // Here: asynchronous calls before this one have written their results.
    MemoryRanges known;
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      if (known.add(calls_[i].outs_.front(), i)) calls_[i].set_apart();
    }
  }
  for (const PreparedCall& call : calls_) {
    call.run(group, of_all != nullptr ? of_all->timeout() : timeout);
    call.write_back();
  }
}

void check_tensor(const at::Tensor& tensor, const Rules& rules, const ErrorContext& context) {
  if (!tensor.defined()) throw UsageError(context, "got an undefined tensor");
  if (tensor.is_quantized()) {  // its bytes alone are not its values
    throw UsageError(context, "got a quantized tensor: pass dequantize() of it");
  }
  const bool is_strided = tensor.layout() == at::kStrided;
  if (is_strided && (tensor.is_cpu() || (rules.takes_cuda && tensor.is_cuda()))) return;
  if (rules.takes_cuda) {
    throw UsageError(context,
                     fmt::format("expected a dense CPU or CUDA tensor, got {}: move it there first",
                                 tensor.toString()));
  }
  throw UsageError(context,
                   fmt::format("a tensor is {} on {}; the backend lockstep takes dense tensors in "
                               "the CPU's memory. For others give a backend of their own, as in "
                               "\"cpu:lockstep,cuda:nccl\"",
                               is_strided ? "dense" : "sparse", tensor.device().str()));
}

void check_result(const at::Tensor& tensor, const ErrorContext& context) {
  const std::string why_not = why_no_result(tensor);
  if (!why_not.empty()) throw UsageError(context, why_not);
}

void check_tensors(const Tensors& ins, const Tensors& outs, bool are_results, const Rules& rules,
                   const ErrorContext& context) {
  for (const at::Tensor& in : ins) check_tensor(in, rules, context);
  for (const at::Tensor& out : outs) {
    check_tensor(out, rules, context);
    if (are_results) check_result(out, context);
  }
  const at::Tensor none;
  const at::Tensor& first = !ins.empty() ? ins[0] : !outs.empty() ? outs[0] : none;
  const auto check_type = [&](const char* name, const Tensors& tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].scalar_type() == first.scalar_type()) continue;
      throw UsageError(context, fmt::format("{} {} is of type {}, {} 0 of {}", name, i,
                                            c10::toString(tensors[i].scalar_type()),
                                            ins.empty() ? "output" : "input",
                                            c10::toString(first.scalar_type())));
    }
  };
  check_type("input", ins);
  check_type("output", outs);
  check_apart(outs, context);
}

void check_reduction(at::ScalarType type, ReduceOp op, const ErrorContext& context) {
  (void)checked_reduction(type, op, context);
}

void check_n_parts(std::size_t n, const Group& group, const ErrorContext& context) {
  if (n == static_cast<std::size_t>(group.size())) return;
  throw UsageError(context,
                   fmt::format("got {} parts, expected one for each of {} ranks", n, group.size()));
}

void check_parts(const Tensors& parts, const at::Tensor& like, const Group& group,
                 const Rules& rules, const ErrorContext& context, bool are_rows) {
  check_n_parts(parts.size(), group, context);
  for (const at::Tensor& part : parts) {
    check_tensor(part, rules, context);
    const std::size_t n_free = are_rows && part.dim() > 0 && part.dim() == like.dim() ? 1 : 0;
    if (part.sizes().slice(n_free) == like.sizes().slice(n_free) &&
        part.scalar_type() == like.scalar_type()) {
      continue;
    }
    throw UsageError(context,
                     fmt::format("parts must be of one shape{} and type: got {} {} and {} {}",
                                 are_rows ? ", but for the first size," : "", like.toString(),
                                 c10::str(like.sizes()), part.toString(), c10::str(part.sizes())));
  }
}

at::Tensor all_gather_rows(const at::Tensor& rows, at::IntArrayRef n_rows, const Rules& rules,
                           const Group& group, Timeout timeout, const ErrorContext& context) {
  std::vector<std::int64_t> sizes = rows.sizes().vec();
  sizes.front() = 0;
  for (const std::int64_t n : n_rows) sizes.front() += n;
  at::Tensor all = at::empty(sizes, rows.options().device(at::kCPU).requires_grad(false));
  PreparedCall({.op = Op::all_gather, .ins = {rows}, .outs = all.split_with_sizes(n_rows)}, rules,
               group, context)
      .run(group, timeout);
  return all;
}

at::Tensor all_reduce_sparse(const at::Tensor& own, int divisor, const Rules& rules,
                             const Group& group, Timeout timeout, const ErrorContext& context) {
  const at::NoGradGuard no_grad;
  const at::Tensor in = own.coalesce();
  const std::int64_t n_own = in._nnz();
  std::vector<std::int64_t> n_rows(static_cast<std::size_t>(group.size()));
  group.all_gather({&n_own, 1, DType::i64}, {n_rows.data(), n_rows.size(), DType::i64}, timeout,
                   context.where);
  const auto gather = [&](const at::Tensor& rows) {
    return all_gather_rows(rows, n_rows, rules, group, timeout, context);
  };
  const at::Tensor indices = gather(in.indices().t());
  at::Tensor values = gather(in.values());
  if (divisor != 1) values.div_(divisor);  // first: sums of 16-bit floats may overflow
  return at::sparse_coo_tensor(indices.t(), values, own.sizes()).coalesce();
}

Tensors unique_tensors(const Tensors& tensors) {
  std::unordered_set<const c10::TensorImpl*> seen;
  Tensors once;
  for (const at::Tensor& tensor : tensors) {
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) once.push_back(tensor);
  }
  return once;
}

}  // namespace lockstep::nn
