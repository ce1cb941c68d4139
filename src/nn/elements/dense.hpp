#pragma once

#include <ATen/ATen.h>

/// Strided tensors whose memory may not hold their values: lazy conjugate and negative views, whose
/// memory holds other values, and zero tensors (_efficientzerotensor), which have no memory.
namespace lockstep::nn {

/// Whether memory holds each value, at the offset given by the strides.
inline bool has_values_in_memory(const at::Tensor& tensor) {
  return !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
}

/// The tensor, or a clone: of the same strides, unless elements overlap or there are gaps.
inline at::Tensor with_values_in_memory(const at::Tensor& tensor) {
  return has_values_in_memory(tensor) ? tensor : tensor.clone();
}

/// Whether memory holds the values contiguously, in order.
inline bool is_dense(const at::Tensor& tensor) {
  return tensor.is_contiguous() && has_values_in_memory(tensor);
}

/// The tensor if is_dense, else a contiguous clone.
inline at::Tensor dense(const at::Tensor& tensor) {
  return is_dense(tensor) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

}  // namespace lockstep::nn
