#include "nn/batch_norm/cuda_batch_norm.hpp"

#include <ATen/ATen.h>

#include <tuple>

#include "nn/batch_norm/layer_steps.hpp"

// ATen's kernels reject tensors without elements.
namespace lockstep::nn::cuda {

using at::Tensor;

void stats(const Tensor& x, const Tensor& to) {
  if (x.numel() == 0) {
    to.zero_();
    return;
  }
  const auto [mean, var] = at::batch_norm_update_stats(x, {}, {}, /*momentum=*/0);
  const std::int64_t c = mean.size(0);
  to.copy_(at::cat({mean, var}));  // one transfer
  to.narrow(0, c, c).mul_(static_cast<double>(x.numel() / c));
}

void normalize(const Tensor& x, const Tensor& statistics, const Tensor& weight, const Tensor& bias,
               Tensor& y) {
  if (y.numel() == 0) return;
  const auto [mean, invstd] = mean_and_invstd(statistics);
  at::batch_norm_elemt_out(y, x, weight, bias, mean, invstd, /*eps=*/0);
}

void backward_reduce(const Tensor& dy, const Tensor& x, const Tensor& statistics,
                     const Tensor& to) {
  if (dy.numel() == 0) {
    to.zero_();
    return;
  }
  const auto [mean, invstd] = mean_and_invstd(statistics);
  const auto reduced = at::batch_norm_backward_reduce(dy, x, mean, invstd, {}, /*input_g=*/true,
                                                      /*weight_g=*/false, /*bias_g=*/false);
  to.copy_(at::cat({std::get<0>(reduced), std::get<1>(reduced)}));
}

void backward_elementwise(const Tensor& dy, const Tensor& x, const Tensor& statistics,
                          const Tensor& weight, const Tensor& means, Tensor& dx) {
  if (dx.numel() == 0) return;
  const auto [mean, invstd] = mean_and_invstd(statistics);
  const auto of = means.chunk(2);
  // The kernel divides by the count: these are means already.
  const Tensor count = at::ones({1}, x.options().dtype(at::kInt));
  dx = at::batch_norm_backward_elemt(dy, x, mean, invstd, weight, of[0], of[1], count);
}

}  // namespace lockstep::nn::cuda
