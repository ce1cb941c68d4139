#pragma once

#include <ATen/core/Tensor.h>

/// The four passes of cpu_batch_norm.hpp over a CUDA tensor, of all channels, by ATen's kernels:
/// those of torch's own SyncBatchNorm. Sums and moments are doubles on the CPU; `statistics`,
/// weight and bias lie on the device, in the type in which ATen computes (for_kernels).
namespace lockstep::nn::cuda {

/// to[2C] <- mean, m2.
void stats(const at::Tensor& x, const at::Tensor& to);
void normalize(const at::Tensor& x, const at::Tensor& statistics, const at::Tensor& weight,
               const at::Tensor& bias, at::Tensor& y);
/// to[2C] <- sum_dy, sum_dy_xmu.
void backward_reduce(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& statistics,
                     const at::Tensor& to);
/// `means`: of dy and dy_xmu over the batch, on the device.
void backward_elementwise(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& statistics,
                          const at::Tensor& weight, const at::Tensor& means, at::Tensor& dx);

}  // namespace lockstep::nn::cuda
