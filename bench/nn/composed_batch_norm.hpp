#pragma once

#include <torch/torch.h>

#include <lockstep/lockstep.hpp>
#include <numeric>
#include <utility>
#include <vector>

#include "gloo.hpp"

/// A synchronised BatchNorm composed of libtorch's operations and a process group.
namespace lockstep::bench {

/// The sum over all ranks; its gradient is too.
class SumOverRanks : public torch::autograd::Function<SumOverRanks> {
 public:
  static torch::Tensor forward(torch::autograd::AutogradContext* /*context*/,
                               const torch::Tensor& x) {
    return summed(x);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* /*context*/,
                                               torch::autograd::tensor_list gradients) {
    return {summed(gradients[0])};
  }

 private:
  static torch::Tensor summed(const torch::Tensor& x) {
    static const auto gloo = make_gloo();
    std::vector<torch::Tensor> tensors{x.contiguous().clone()};
    gloo->allreduce(tensors)->wait();
    return tensors[0];
  }
};

class ComposedBatchNormImpl : public torch::nn::Module {
 public:
  explicit ComposedBatchNormImpl(std::int64_t channels)
      : weight(register_parameter("weight", torch::ones(channels))),
        bias(register_parameter("bias", torch::zeros(channels))),
        running_mean_(register_buffer("running_mean", torch::zeros(channels))),
        running_var_(register_buffer("running_var", torch::ones(channels))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    std::vector<std::int64_t> dims(static_cast<std::size_t>(x.dim()));
    std::iota(dims.begin(), dims.end(), 0);
    dims.erase(dims.begin() + 1);
    const double count = static_cast<double>(x.numel() / x.size(1));
    const torch::Tensor own = torch::cat({x.sum(dims), (x * x).sum(dims), torch::full({1}, count)});
    const torch::Tensor all = SumOverRanks::apply(own);
    const torch::Tensor n = all[-1].detach();
    const torch::Tensor mean = all.narrow(0, 0, x.size(1)) / n;
    const torch::Tensor var = all.narrow(0, x.size(1), x.size(1)) / n - mean * mean;
    {
      const torch::NoGradGuard guard;
      running_mean_.lerp_(mean, 0.1);
      running_var_.lerp_(var * n / (n - 1), 0.1);
    }
    std::vector<std::int64_t> shape(dims.size() + 1, 1);
    shape[1] = x.size(1);
    const torch::Tensor scale = weight * torch::rsqrt(var + 1e-5);
    return x * scale.view(shape) + (bias - mean * scale).view(shape);
  }

  torch::Tensor weight;
  torch::Tensor bias;

 private:
  torch::Tensor running_mean_;
  torch::Tensor running_var_;
};
TORCH_MODULE(ComposedBatchNorm);

}  // namespace lockstep::bench
