#pragma once

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <cstddef>
#include <optional>
#include <string>

#include <lockstep/types.hpp>

#include "nn/elements/dense.hpp"

/// A tensor's elements, as a group transfers and reduces them.
namespace lockstep::nn {

/// nullopt for a type that lockstep does not reduce.
inline std::optional<DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kBool: return DType::boolean;
    case at::kByte: return DType::u8;
    case at::kChar: return DType::i8;
    case at::kShort: return DType::i16;
    case at::kInt: return DType::i32;
    case at::kLong: return DType::i64;
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 3)
    case at::kUInt16: return DType::u16;
    case at::kUInt32: return DType::u32;
    case at::kUInt64: return DType::u64;
#endif
    case at::kHalf: return DType::f16;
    case at::kBFloat16: return DType::bf16;
    case at::kFloat: return DType::f32;
    case at::kDouble: return DType::f64;
    default: return std::nullopt;  // ScalarType is libtorch's and grows with its versions
  }
}

/// How a group reduces elements: sums and means of complex numbers are those of their two parts.
struct ReducedAs {
  DType dtype;
  std::size_t n_parts;  ///< per element
};
/// nullopt for a type that `op` does not support.
inline std::optional<ReducedAs> reduced_as(at::ScalarType type, ReduceOp op) {
  const bool has_parts = c10::isComplexType(type) && (op == ReduceOp::sum || op == ReduceOp::mean);
  const auto dtype = dtype_of(has_parts ? c10::toRealValueType(type) : type);
  if (!dtype) return std::nullopt;
  return ReducedAs{*dtype, has_parts ? 2U : 1U};
}

/// Why a result cannot be written to the tensor; empty if it can.
inline std::string why_no_result(const at::Tensor& tensor) {
  if (tensor._is_zerotensor()) {
    return "the result cannot be written to a zero tensor (_efficientzerotensor), which has no "
           "memory; pass a clone() of it";
  }
  if (at::has_internal_overlap(tensor) != at::MemOverlap::Yes) return {};
  return fmt::format(
      "the result cannot be written to a tensor of sizes {} and strides {}, which is expanded: "
      "several of its elements share memory; pass a clone() of it",
      c10::str(tensor.sizes()), c10::str(tensor.strides()));
}

/// Copies a result to the tensor, unless it is there: `result` is the tensor, dense() of it, or in
/// memory of its own. Threads: any, also one that is not in the caller's inference mode.
inline void write_back(const at::Tensor& result, const at::Tensor& tensor) {
  if (result.data_ptr() == tensor.data_ptr()) return;
  const at::NoGradGuard no_grad;
  std::optional<c10::InferenceMode> inference;
  if (tensor.is_inference()) inference.emplace();
  at::Tensor(tensor).copy_(result);
}

}  // namespace lockstep::nn
