#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>

#include "kernels/batch_norm.hpp"

/// Runs the kernels of batch_norm.hpp over CPU tensors on libtorch's threads, for some channels.
/// Per-channel arrays begin with the first of these; weight and bias are complete. Results are
/// bitwise equal for any number of threads and any division into channels.
namespace lockstep::nn::cpu {

struct Channels {
  std::size_t first = 0;
  std::size_t count = 0;
};

/// Calls f(first, n) for parts of [0, n) on libtorch's threads, and returns when all are done.
/// Each of n has `n_values`; if the total is small, there is one part, on the calling thread.
void in_parallel(std::size_t n, std::size_t n_values,
                 const std::function<void(std::size_t first, std::size_t n)>& f);

/// `shape` describes one tensor of float, double or a 16-bit float; weight and bias of a 16-bit one
/// are float. Only a shape whose channels are stored in long contiguous runs, or that has no
/// values, can be divided by channels.
bool is_divisible(kernels::BatchNormShape shape);

void stats(const at::Tensor& x, kernels::BatchNormShape shape, Channels channels, double* mean,
           double* m2);
void normalize(const at::Tensor& x, kernels::BatchNormShape shape, Channels channels,
               const double* mean, const double* invstd, const at::Tensor& weight,
               const at::Tensor& bias, const at::Tensor& y);
void backward_reduce(const at::Tensor& dy, const at::Tensor& x, kernels::BatchNormShape shape,
                     Channels channels, const double* mean, double* sum_dy, double* sum_dy_xmu);
void backward_elementwise(const at::Tensor& dy, const at::Tensor& x, kernels::BatchNormShape shape,
                          Channels channels, const double* mean, const double* invstd,
                          const at::Tensor& weight, const double* mean_dy,
                          const double* mean_dy_xmu, const at::Tensor& dx);

}  // namespace lockstep::nn::cpu
