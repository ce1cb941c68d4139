#include "nn/backend/tensors.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

#include "group/argument_checks.hpp"

namespace lockstep::backend {
namespace {

std::optional<ReduceOp> op_of(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM: return ReduceOp::sum;
    case c10d::ReduceOp::AVG: return ReduceOp::mean;
    case c10d::ReduceOp::PRODUCT: return ReduceOp::product;
    case c10d::ReduceOp::MIN: return ReduceOp::min;
    case c10d::ReduceOp::MAX: return ReduceOp::max;
    case c10d::ReduceOp::BAND: return ReduceOp::band;
    case c10d::ReduceOp::BOR: return ReduceOp::bor;
    case c10d::ReduceOp::BXOR: return ReduceOp::bxor;
    case c10d::ReduceOp::PREMUL_SUM:
    case c10d::ReduceOp::UNUSED: break;
  }
  return std::nullopt;
}

ReduceOp op_of_bool(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max: return ReduceOp::bor;
    case ReduceOp::product:
    case ReduceOp::min: return ReduceOp::band;
    case ReduceOp::band:
    case ReduceOp::bor:
    case ReduceOp::bxor:
    case ReduceOp::mean: break;
  }
  return op;
}

}  // namespace

Elements elements_of(const at::Tensor& tensor) {
  const auto count = static_cast<std::size_t>(tensor.numel());
  if (const auto dtype = nn::dtype_of(tensor.scalar_type())) {
    return {.data = tensor.data_ptr(), .count = count, .dtype = *dtype};
  }
  return {.data = tensor.data_ptr(), .count = count * tensor.itemsize(), .dtype = DType::u8};
}

Reduction reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& op,
                       const ErrorContext& context) {
  const auto known = op_of(op.op_);
  if (!known) {
    throw UsageError(
        context, "PREMUL_SUM is supported by NCCL only: multiply the tensor first, then use SUM");
  }
  const at::ScalarType type = tensor.scalar_type();
  const ReduceOp reduce = type == at::kBool ? op_of_bool(*known) : *known;
  const auto as = nn::reduced_as(type, reduce);
  if (!as) {
    throw UsageError(context, fmt::format("cannot reduce elements of type {} by {}",
                                          at::toString(type), name_of(reduce)));
  }
  // Here, because a call that is refused does not wait for those before it.
  if (!internal::can_reduce(reduce, as->dtype)) {
    throw UsageError(context, internal::why_no_reduction(reduce, as->dtype));
  }
  return {.elements = {.data = tensor.data_ptr(),
                       .count = static_cast<std::size_t>(tensor.numel()) * as->n_parts,
                       .dtype = as->dtype},
          .op = reduce};
}

const at::Tensor& only(const Tensors& tensors, const ErrorContext& context) {
  if (tensors.size() != 1) {
    throw UsageError(context, fmt::format("{} tensors; the backend lockstep takes one per rank",
                                          tensors.size()));
  }
  return tensors.front();
}

at::Tensor contiguous(const at::Tensor& tensor, const ErrorContext& context) {
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) {
    throw UsageError(
        context,
        fmt::format("a tensor is {} on {}; the backend lockstep takes dense tensors in "
                    "the CPU's memory. For others give a backend of their own, as in "
                    "\"cpu:lockstep,cuda:nccl\"",
                    tensor.layout() == at::kStrided ? "dense" : "sparse", tensor.device().str()));
  }
  const at::NoGradGuard no_grad;
  return nn::dense(tensor);
}

void check_output(const at::Tensor& tensor, const ErrorContext& context) {
  const std::string why_not = nn::why_no_result(tensor);
  if (!why_not.empty()) throw UsageError(context, why_not);
}

void check_outputs_apart(const Tensors& tensors, const ErrorContext& context) {
  if (const auto shared = nn::find_shared_results(tensors)) {
    throw UsageError(context, fmt::format("outputs {} and {} share memory; give each its own",
                                          shared->first, shared->second));
  }
}

at::Tensor contiguous_output(const at::Tensor& tensor, const ErrorContext& context) {
  at::Tensor in_place = contiguous(tensor, context);
  check_output(tensor, context);
  return in_place;
}

std::vector<nn::MemoryRange> ranges_of(const Tensors& tensors) {
  return {tensors.begin(), tensors.end()};
}

at::Tensor apart_from(const std::vector<nn::MemoryRange>& outputs, const at::Tensor& input) {
  const auto is_written = [range = nn::MemoryRange(input)](const nn::MemoryRange& output) {
    return range.overlaps(output);
  };
  return std::ranges::any_of(outputs, is_written) ? input.clone() : input;
}

Storages storages_of(const Tensors& some, const Tensors& others) {
  Storages storages;
  storages.reserve(some.size() + others.size());
  for (const Tensors* const tensors : {&some, &others}) {
    for (const at::Tensor& tensor : *tensors) {
      if (tensor.has_storage()) storages.push_back(tensor.storage());  // sparse ones have none
    }
  }
  return storages;
}

}  // namespace lockstep::backend
