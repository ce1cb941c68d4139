#pragma once

#include <ATen/ATen.h>

/// Tensors whose memory is their values. A view by the conjugate or the negative bit has the memory
/// of other values, and a zero tensor, as autograd makes, has none. For tensors with strides.
namespace lockstep::nn {

/// Whether each value stands in memory, at the place that the strides say.
inline bool has_values_in_memory(const at::Tensor& tensor) {
  return !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
}

/// The tensor, or a clone: of the same strides, unless elements overlap or there are gaps.
inline at::Tensor with_values_in_memory(const at::Tensor& tensor) {
  return has_values_in_memory(tensor) ? tensor : tensor.clone();
}

/// Whether the memory is the values in their order.
inline bool is_dense(const at::Tensor& tensor) {
  return tensor.is_contiguous() && has_values_in_memory(tensor);
}

/// The tensor, or a clone whose memory is the values in their order.
inline at::Tensor dense(const at::Tensor& tensor) {
  return is_dense(tensor) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

}  // namespace lockstep::nn
