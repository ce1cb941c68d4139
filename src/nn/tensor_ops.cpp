#include <lockstep/nn/tensor_ops.hpp>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <lockstep/error.hpp>

#include "nn/error.hpp"

namespace lockstep::nn {
namespace {

void check_tensor(const char* operation, const at::Tensor& tensor, const Group& group,
                  std::source_location where) {
  if (!tensor.defined()) {
    throw UsageError(context_of(operation, group, where), "got an undefined tensor");
  }
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) {
    throw UsageError(
        context_of(operation, group, where),
        fmt::format("expected a dense CPU tensor, got {}: move it there first", tensor.toString()));
  }
}

Elements bytes_of(const at::Tensor& contiguous) {
  return {contiguous.data_ptr(), contiguous.nbytes(), DType::u8};
}

}  // namespace

DType dtype_of(const at::Tensor& tensor, std::source_location where) {
  switch (tensor.scalar_type()) {
    case at::kByte: return DType::u8;
    case at::kChar: return DType::i8;
    case at::kInt: return DType::i32;
    case at::kLong: return DType::i64;
    case at::kHalf: return DType::f16;
    case at::kBFloat16: return DType::bf16;
    case at::kFloat: return DType::f32;
    case at::kDouble: return DType::f64;
    default:  // ScalarType is libtorch's and grows with its versions
      throw UsageError({"dtype_of", "", -1, 0, where},
                       fmt::format("tensors of {} cannot be reduced; convert it to u8, i8, i32, "
                                   "i64, f16, bf16, f32 or f64",
                                   c10::toString(tensor.scalar_type())));
  }
}

Elements elements_of(const at::Tensor& tensor, std::source_location where) {
  check_tensor("elements_of", tensor, Group(), where);
  if (!tensor.is_contiguous()) {
    throw UsageError({"elements_of", "", -1, 0, where},
                     "expected a contiguous tensor: call contiguous() first");
  }
  return {tensor.data_ptr(), static_cast<std::size_t>(tensor.numel()), dtype_of(tensor, where)};
}

void all_reduce(at::Tensor& data, ReduceOp op, const Group& group, Deadline deadline,
                std::source_location where) {
  check_tensor("all_reduce", data, group, where);
  const at::NoGradGuard no_grad;
  const at::Tensor dense = data.contiguous();
  group.all_reduce(elements_of(dense, where), op, deadline, where);
  if (!dense.is_same(data)) data.copy_(dense);
}

void broadcast(at::Tensor& data, int src, const Group& group, Deadline deadline,
               std::source_location where) {
  check_tensor("broadcast", data, group, where);
  const at::NoGradGuard no_grad;
  const at::Tensor dense = data.contiguous();
  group.broadcast(bytes_of(dense), src, deadline, where);
  if (!dense.is_same(data)) data.copy_(dense);
}

std::vector<at::Tensor> all_gather(const at::Tensor& data, const Group& group, Deadline deadline,
                                   std::source_location where) {
  check_tensor("all_gather", data, group, where);
  const at::NoGradGuard no_grad;
  const at::Tensor dense = data.detach().contiguous();
  std::vector<std::int64_t> sizes{group.size()};
  sizes.insert(sizes.end(), dense.sizes().begin(), dense.sizes().end());
  const at::Tensor all = at::empty(sizes, dense.options());
  group.all_gather(bytes_of(dense), bytes_of(all), deadline, where);
  return all.unbind();
}

}  // namespace lockstep::nn
