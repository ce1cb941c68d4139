#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <cmath>
#include <lockstep/error.hpp>
#include <lockstep/trace.hpp>
#include <span>
#include <utility>
#include <vector>

#include "nn/batch_norm/cuda_batch_norm.hpp"
#include "nn/batch_norm/layer_steps.hpp"
#include "nn/elements/dense.hpp"

namespace lockstep::nn {

using at::Tensor;

namespace {

/// `gradient` in the type and layout of x.
Tensor gradient_like(const Tensor& gradient, const Tensor& x) {
  if (gradient.strides() == x.strides() && gradient.scalar_type() == x.scalar_type() &&
      has_values_in_memory(gradient)) {
    return gradient;
  }
  return at::empty_like(x).copy_(gradient);
}

/// sum_dy, sum_dy_xmu of this rank's values of these channels, as doubles. `statistics`: returned
/// by for_kernels, of all channels.
Tensor sum_gradients(const Tensor& dy, const Activation& x, Channels channels,
                     const Tensor& statistics) {
  const auto c = static_cast<std::int64_t>(channels.count);
  Tensor sums = doubles(2 * c);
  if (x.tensor.is_cuda()) {
    cuda::backward_reduce(dy, x.tensor, statistics, sums);
  } else {
    cpu::backward_reduce(dy, x.tensor, x.shape, channels, data(statistics) + 1 + channels.first,
                         data(sums), data(sums) + c);
  }
  return sums;
}

/// `statistics`: returned by for_kernels, of all channels. `dx` has the layout of x.
void input_gradient(const Tensor& dy, const Activation& x, Channels channels,
                    const Tensor& statistics, const Tensor& weight, const Tensor& mean_gradients,
                    Tensor& dx) {
  if (x.tensor.is_cuda()) {
    return cuda::backward_elementwise(dy, x.tensor, statistics, weight,
                                      for_kernels(x, mean_gradients), dx);
  }
  const double* const means = data(statistics) + 1 + channels.first;
  cpu::backward_elementwise(dy, x.tensor, x.shape, channels, means, means + x.shape.channels,
                            weight, data(mean_gradients), data(mean_gradients) + channels.count,
                            dx);
}

/// The gradients of weight and bias, if requested.
class ParameterGradients {
 public:
  ParameterGradients(const Activation& x, const BatchNormBackwardPiece& piece)
      : options_(parameter_options(x.tensor)) {
    const auto size = static_cast<std::int64_t>(x.shape.channels);
    const auto on_cpu = options_.device(at::kCPU);
    if (piece.wants_weight) weight_ = at::empty({size}, on_cpu);
    if (piece.wants_bias) bias_ = at::empty({size}, on_cpu);
  }

  /// Computes them for some channels. `sums`: sum_gradients of these. `invstd`: of all channels.
  void compute(const Tensor& sums, Channels channels, const double* invstd) {
    const double* const sum_dy = data(sums);
    const double* const sum_dy_xmu = sum_dy + channels.count;
    // Written by hand: a libtorch operation costs as much as a small layer's kernel.
    const auto fill = [channels](const Tensor& gradient, const auto& value_of) {
      if (!gradient.defined()) return;
      AT_DISPATCH_FLOATING_TYPES(gradient.scalar_type(), "sync_batch_norm_backward", [&] {
        scalar_t* const to = gradient.data_ptr<scalar_t>() + channels.first;
        for (std::size_t c = 0; c < channels.count; ++c) to[c] = static_cast<scalar_t>(value_of(c));
      });
    };
    fill(weight_, [&](std::size_t c) { return sum_dy_xmu[c] * invstd[channels.first + c]; });
    fill(bias_, [&](std::size_t c) { return sum_dy[c]; });
  }

  /// Returns dx and the gradients, on the device of the input.
  BatchNormGradients finish(Tensor dx) {
    if (options_.device().is_cuda()) {
      if (weight_.defined() && bias_.defined()) {
        const Tensor both = at::stack({weight_, bias_}).to(options_);  // one transfer
        weight_ = both[0];
        bias_ = both[1];
      } else if (Tensor& one = weight_.defined() ? weight_ : bias_; one.defined()) {
        one = one.to(options_);
      }
    }
    return {std::move(dx), std::move(weight_), std::move(bias_)};
  }

 private:
  at::TensorOptions options_;
  Tensor weight_, bias_;
};

/// The message of backward: turns sum_dy, sum_dy_xmu of some channels into means over all ranks.
void average_gradient(std::span<double> message, const double* invstd, double count,
                      const BatchNormSettings& settings) {
  settings.layer.all_reduce(kBackward, {message.data(), message.size(), DType::f64}, ReduceOp::sum);
  if (count > 0) {
    for (double& value : message) value /= count;
  }
  if (settings.eps_mode == EpsMode::plus) return;
  // A clamped variance is constant: its gradient is zero.
  const double clamped_invstd = 1 / std::sqrt(settings.eps);
  const std::size_t channels = message.size() / 2;
  for (std::size_t c = 0; c < channels; ++c) {
    if (invstd[c] == clamped_invstd) message[channels + c] = 0;
  }
}

}  // namespace

std::vector<BatchNormGradients> batch_norm_backward(std::span<const BatchNormBackwardPiece> pieces,
                                                    const BatchNormRecord& record,
                                                    const Tensor& means) {
  const TraceScope scope("SyncBatchNorm backward");
  const bool wants_input = pieces.front().wants_input;
  struct Piece {
    Activation x;
    Tensor dy, dx;
    ParameterGradients parameters;
  };
  const auto run = [&] {
    refuse_create_graph(kBackward, record.settings.layer,
                        "TorchScript cannot take gradients of the gradients of a batch_norm in a "
                        "SyncBatchNormScope: call the model unscripted, or backward or grad "
                        "without create_graph");
    const at::AutoDispatchBelowADInplaceOrView without_history;
    std::vector<Piece> all;
    for (const BatchNormBackwardPiece& piece : pieces) {
      const Activation x = activation_of(piece.input);
      all.push_back({x,
                     gradient_like(piece.grad_output, x.tensor),
                     wants_input ? at::empty_like(x.tensor) : Tensor(),
                     {x, piece}});
    }
    const std::size_t n_channels = all.front().x.shape.channels;
    const double* const invstd = data(record.statistics) + 1 + n_channels;
    for_each_message(n_channels, record.channels_per_message, [&](Channels channels) {
      Tensor message;
      for (std::size_t i = 0; i < all.size(); ++i) {
        Piece& piece = all[i];
        const Tensor sums = sum_gradients(piece.dy, piece.x, channels, record.for_kernels[i]);
        piece.parameters.compute(sums, channels, invstd);
        message = i == 0 ? sums : message.add_(sums);  // in the order of the pieces
      }
      if (!wants_input) return;
      average_gradient({data(message), 2 * channels.count}, invstd + channels.first,
                       data(record.statistics)[0], record.settings);
      if (means.defined()) copy_channels(data(message), channels, n_channels, data(means));
      for (std::size_t i = 0; i < all.size(); ++i) {
        Piece& piece = all[i];
        input_gradient(piece.dy, piece.x, channels, record.for_kernels[i], pieces[i].weight,
                       message, piece.dx);
      }
    });
    std::vector<BatchNormGradients> results;
    for (Piece& piece : all) results.push_back(piece.parameters.finish(std::move(piece.dx)));
    return results;
  };
  // Without a gradient of the input it sends nothing.
  return wants_input ? record.settings.layer.guard(run) : run();
}

}  // namespace lockstep::nn
