#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <unordered_set>
#include <vector>

#include <lockstep/error.hpp>
#include <lockstep/group.hpp>

#include "nn/elements/elements.hpp"
#include "nn/error.hpp"

/// Tensors as buffers of a Group's operations, and back.
namespace lockstep::nn {

inline void check_tensor(const char* operation, const at::Tensor& tensor, const Group& group,
                         std::source_location where) {
  if (!tensor.defined()) {
    throw UsageError(context_of(operation, group, where), "got an undefined tensor");
  }
  if (!(tensor.is_cpu() || tensor.is_cuda()) || tensor.layout() != at::kStrided) {
    throw UsageError(context_of(operation, group, where),
                     fmt::format("expected a dense CPU or CUDA tensor, got {}: move it there first",
                                 tensor.toString()));
  }
}

/// Checks a tensor that a result is written to.
inline void check_result(const char* operation, const at::Tensor& tensor, const Group& group,
                         std::source_location where) {
  check_tensor(operation, tensor, group, where);
  const std::string why_not = why_no_result(tensor);
  if (!why_not.empty()) throw UsageError(context_of(operation, group, where), why_not);
}

/// A tensor that a group accepts: the tensor itself if it is dense, on the CPU.
inline at::Tensor for_group(const at::Tensor& tensor) { return dense(tensor.detach().cpu()); }

/// The same, after a check that the tensor can be sent.
inline at::Tensor for_group(const char* operation, const at::Tensor& tensor, const Group& group,
                            std::source_location where) {
  check_tensor(operation, tensor, group, where);
  return for_group(tensor);
}

/// As for_group, for a tensor that the result is written to; see copy_back.
inline at::Tensor for_result(const char* operation, const at::Tensor& tensor, const Group& group,
                             std::source_location where) {
  check_result(operation, tensor, group, where);
  return for_group(tensor);
}

/// Throws UsageError if op does not take the tensor's type.
ReducedAs reduced_as(const char* operation, const at::Tensor& tensor, ReduceOp op,
                     const Group& group, std::source_location where);
/// `dense`: what for_group made.
inline Elements reduced_elements(const char* operation, const at::Tensor& dense, ReduceOp op,
                                 const Group& group, std::source_location where) {
  const ReducedAs as = reduced_as(operation, dense, op, group, where);
  return {dense.data_ptr(), static_cast<std::size_t>(dense.numel()) * as.n_parts, as.dtype};
}

/// Writes the result back. Autograd must see also a result that the group wrote in place: a graph
/// that saved the tensor before would use it.
inline void copy_back(const at::Tensor& result, const at::Tensor& data) {
  const bool is_in_place = result.data_ptr() == data.data_ptr();
  write_back(result, data);
  if (is_in_place && !data.is_inference()) data.unsafeGetTensorImpl()->bump_version();
}

/// Removes duplicates. libtorch's parameters() lists a tensor twice if it is registered under two
/// names.
inline std::vector<at::Tensor> unique_tensors(const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<at::Tensor> once;
  for (const at::Tensor& tensor : tensors) {
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) once.push_back(tensor);
  }
  return once;
}

inline std::vector<at::Tensor> rows_on(at::Device device, const at::Tensor& all) {
  return all.to(device).unbind();
}

inline void check_n_parts(const char* operation, std::size_t n, const Group& group,
                          std::source_location where) {
  if (n == static_cast<std::size_t>(group.size())) return;
  throw UsageError(context_of(operation, group, where),
                   fmt::format("got {} parts, expected one for each of {} ranks", n, group.size()));
}

/// Parts must be like `like`, one per rank; their first sizes may differ if are_rows.
inline void check_parts(const char* operation, const std::vector<at::Tensor>& parts,
                        const at::Tensor& like, const Group& group, std::source_location where,
                        bool are_rows = false) {
  check_n_parts(operation, parts.size(), group, where);
  for (const at::Tensor& part : parts) {
    check_tensor(operation, part, group, where);
    const std::size_t n_free = are_rows && part.dim() > 0 && part.dim() == like.dim() ? 1 : 0;
    if (part.sizes().slice(n_free) == like.sizes().slice(n_free) &&
        part.scalar_type() == like.scalar_type()) {
      continue;
    }
    throw UsageError(context_of(operation, group, where),
                     fmt::format("parts must be of one shape{} and type: got {} {} and {} {}",
                                 are_rows ? ", but for the first size," : "", like.toString(),
                                 c10::str(like.sizes()), part.toString(), c10::str(part.sizes())));
  }
}

inline at::Tensor join_parts(const char* operation, const std::vector<at::Tensor>& parts,
                             const at::Tensor& like, const Group& group,
                             std::source_location where) {
  check_parts(operation, parts, like, group, where);
  return for_group(at::stack(parts));
}

inline at::Tensor rows_like(const at::Tensor& data, const Group& group) {
  std::vector<std::int64_t> sizes{group.size()};
  sizes.insert(sizes.end(), data.sizes().begin(), data.sizes().end());
  return at::empty(sizes, data.options().requires_grad(false));
}

inline Elements bytes_of(const at::Tensor& contiguous) {
  return {contiguous.data_ptr(), contiguous.nbytes(), DType::u8};
}

}  // namespace lockstep::nn
