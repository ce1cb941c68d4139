#include "nn/backend/tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace lockstep::backend {

ReduceOp reduction_of(const c10d::ReduceOp& op, const ErrorContext& context) {
  switch (op.op_) {
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
  throw UsageError(context,
                   "PREMUL_SUM is supported by NCCL only: multiply the tensor first, then use SUM");
}

int rank_of(std::int64_t rank) {
  using Limits = std::numeric_limits<int>;
  return static_cast<int>(std::clamp<std::int64_t>(rank, Limits::min(), Limits::max()));
}

const at::Tensor& only(const Tensors& tensors, const ErrorContext& context) {
  if (tensors.size() == 1) return tensors.front();
  throw UsageError(
      context, fmt::format("{} tensors; the backend lockstep takes one per rank", tensors.size()));
}

const Tensors& only_list(const std::vector<Tensors>& lists, const ErrorContext& context) {
  if (lists.size() == 1) return lists.front();
  throw UsageError(context, fmt::format("{} lists of tensors; it takes one", lists.size()));
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
