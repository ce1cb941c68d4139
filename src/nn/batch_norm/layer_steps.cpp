#include "nn/batch_norm/layer_steps.hpp"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>
#include <lockstep/error.hpp>
#include <lockstep/trace.hpp>
#include <span>
#include <vector>

#include "group/native_engine.hpp"
#include "kernels/isa.hpp"
#include "nn/batch_norm/cuda_batch_norm.hpp"
#include "nn/elements/dense.hpp"

namespace lockstep::nn {

using at::Tensor;

namespace {

std::size_t channels_of(const Tensor& statistics) {
  return static_cast<std::size_t>(statistics.size(-1) - 1) / 2;
}

/// With the C values of the statistics from `begin` on.
void update_running(const Tensor& running, double factor, const Tensor& statistics,
                    std::int64_t begin, double scale) {
  if (!running.defined()) return;
  if (running.is_cpu() && !is_16_bit(running)) {  // halves the time of a small layer
    const Tensor in_memory = with_values_in_memory(running);
    AT_DISPATCH_FLOATING_TYPES(running.scalar_type(), "sync_batch_norm", [&] {
      scalar_t* const to = in_memory.data_ptr<scalar_t>();
      const double* const from = data(statistics) + begin;
      const std::int64_t channels = running.size(0), stride = in_memory.stride(0);
      for (std::int64_t c = 0; c < channels; ++c) {
        scalar_t& value = to[c * stride];
        value = static_cast<scalar_t>(static_cast<double>(value) * (1 - factor) +
                                      from[c] * (factor * scale));
      }
    });
    if (!in_memory.is_same(running)) running.copy_(in_memory);
    return;
  }
  const Tensor values = statistics.narrow(0, begin, running.size(0)).to(running.device());
  // Of doubles, rounded once.
  running.copy_(at::add(values * (factor * scale), running, 1 - factor));
}

/// Replaces m2 by invstd.
void m2_to_invstd(std::span<double> m2s, double n, const BatchNormSettings& settings) {
  for (double& value : m2s) {
    // Without samples any finite number makes the sums of backward 0, whatever eps is.
    if (n == 0) {
      value = 1;
      continue;
    }
    const double var = value / n;
    switch (settings.eps_mode) {
      case EpsMode::plus: value = 1 / std::sqrt(var + settings.eps); break;
      // Written to propagate a NaN.
      case EpsMode::clamp: value = 1 / std::sqrt(var < settings.eps ? settings.eps : var); break;
    }
  }
}

/// Whether `running`, doubles if undefined, can hold the mean and the variance of each channel; the
/// same on all ranks. A NaN or an infinity in the batch makes its channel's mean non-finite.
bool are_finite(const Tensor& statistics, const Tensor& running) {
  double largest = std::numeric_limits<double>::max();
  if (running.defined()) {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, running.scalar_type(), "sync_batch_norm",
        [&] { largest = static_cast<double>(std::numeric_limits<scalar_t>::max()); });
  }
  const std::size_t channels = channels_of(statistics);
  const double* const means = data(statistics) + 1;
  const double* const m2s = means + channels;
  const double n = std::max(data(statistics)[0], 2.0);
  for (std::size_t c = 0; c < channels; ++c) {
    const bool is_finite = std::abs(means[c]) <= largest && m2s[c] / (n - 1) <= largest;
    if (!is_finite) return false;  // also of a NaN
  }
  return true;
}

/// The number of channels for which the data of this rank fits into its threads' caches.
std::size_t fitting_channels(const Activation& x) {
  const std::size_t all = x.shape.channels;
  if (x.tensor.numel() == 0) return 1;  // any peer's preference prevails
  if (!x.tensor.is_cpu() || !cpu::is_divisible(x.shape)) return all;
  const auto n_threads = static_cast<std::size_t>(at::get_num_threads());
  // Backward reads and writes the most: dy, x, dx.
  const std::size_t channel_bytes = 3 * x.shape.n_per_channel() * x.tensor.element_size();
  return std::min(all,
                  std::max(n_threads * kernels::kCaches.reuse_bytes / channel_bytes, n_threads));
}

/// Calls f(some channels) until all are done.
template <class F>
void for_each_message(std::size_t channels, std::size_t per_message, const F& f) {
  for (std::size_t c = 0; c < channels; c += per_message) {
    f(Channels{c, std::min(per_message, channels - c)});
  }
}

/// Copies `part` of two per-channel arrays to its place among all channels.
void copy_channels(const double* part, Channels channels, std::size_t all, double* to) {
  std::copy_n(part, channels.count, to + channels.first);
  std::copy_n(part + channels.count, channels.count, to + all + channels.first);
}

}  // namespace

at::TensorOptions parameter_options(const Tensor& input) {
  return at::TensorOptions(input.device())
      .dtype(is_16_bit(input) ? at::kFloat : input.scalar_type());
}

OptionalTensor parameter_for(const Tensor& parameter, const Tensor& input) {
  if (!parameter.defined()) return {};
  const auto type = is_16_bit(input) ? at::kFloat : input.scalar_type();
  // The usual case, which `to` would take a microsecond to detect.
  if (parameter.scalar_type() == type && parameter.device() == input.device() &&
      is_dense(parameter)) {
    return parameter;
  }
  return dense(parameter.to(parameter_options(input)));
}

void count_batch(Tensor n_batches) {
  if (n_batches.is_cpu() && n_batches.scalar_type() == at::kLong && n_batches.numel() == 1 &&
      has_values_in_memory(n_batches)) {
    ++*n_batches.data_ptr<std::int64_t>();  // by libtorch's addition it takes microseconds
    n_batches.unsafeGetTensorImpl()->bump_version();  // as every operation in place does
  } else {
    n_batches += 1;
  }
}

Tensor gradient_like(const Tensor& gradient, const Tensor& x) {
  if (gradient.strides() == x.strides() && gradient.scalar_type() == x.scalar_type() &&
      has_values_in_memory(gradient)) {
    return gradient;
  }
  return at::empty_like(x).copy_(gradient);
}

Activation activation_of(const Tensor& input) {
  const auto outer = static_cast<std::size_t>(input.size(0));
  const auto channels = static_cast<std::size_t>(input.size(1));
  std::size_t inner = 1;
  for (const auto size : input.sizes().slice(2)) inner *= static_cast<std::size_t>(size);
  if (!input.is_contiguous() && input.movedim(1, -1).is_contiguous()) {
    return {with_values_in_memory(input), {outer * inner, channels, 1}};
  }
  return {dense(input), {outer, channels, inner}};
}

Tensor local_statistics(const Activation& x, Channels channels) {
  const auto c = static_cast<std::int64_t>(channels.count);
  const auto n = static_cast<double>(x.shape.n_per_channel());
  Tensor statistics = doubles(1 + 2 * c);
  double* const out = data(statistics);
  out[0] = n;
  if (x.tensor.is_cuda()) {
    cuda::stats(x.tensor, statistics.narrow(0, 1, 2 * c));
  } else {
    cpu::stats(x.tensor, x.shape, channels, out + 1, out + 1 + c);
  }
  return statistics;
}

std::size_t agree_on_channels(std::size_t preferred, std::size_t all, const Layer& layer) {
  const Group& group = layer.group;
  if (!internal::NativeGroup::has_low_latency(group) || all == 0)
    return std::max<std::size_t>(all, 1);
  auto most = static_cast<std::int64_t>(preferred);
  if (group.size() > 1) {
    layer.all_reduce(kForward, {&most, 1, DType::i64}, ReduceOp::max);
  }
  return static_cast<std::size_t>(most);
}

bool finish_statistics(const Tensor& statistics, const BatchNormSettings& settings,
                       at::IntArrayRef input_sizes) {
  const double n = data(statistics)[0];
  if (n == 1) {
    throw UsageError(settings.layer.context(kForward),
                     "Expected more than 1 value per channel when training, got input size " +
                         c10::str(input_sizes));
  }
  const std::size_t channels = channels_of(statistics);
  const std::span m2s(data(statistics) + 1 + channels, channels);
  const bool nonfinite = !are_finite(statistics, settings.running_var);
  const bool keeps = nonfinite && settings.on_nonfinite == OnNonfinite::keep_running_stats;
  if (n > 0 && !keeps) {
    const auto c = static_cast<std::int64_t>(channels);
    const Tensor& mean = settings.running_mean;
    // Both in one transfer.
    const Tensor there =
        mean.defined() && !mean.is_cpu() ? statistics.to(mean.device()) : statistics;
    update_running(mean, settings.factor, there, 1, /*scale=*/1);
    update_running(settings.running_var, settings.factor, there, 1 + c, 1 / (n - 1));
  }
  m2_to_invstd(m2s, n, settings);
  return nonfinite;
}

Tensor for_kernels(const Activation& x, const Tensor& values) {
  return x.tensor.is_cuda() ? values.to(parameter_options(x.tensor)) : values;
}

void normalize(const Activation& x, Channels channels, const Tensor& statistics,
               const Tensor& weight, const Tensor& bias, Tensor& output) {
  if (x.tensor.is_cuda()) {
    return cuda::normalize(x.tensor, statistics, weight, bias, output);
  }
  const double* const means = data(statistics) + 1;
  cpu::normalize(x.tensor, x.shape, channels, means, means + channels.count, weight, bias, output);
}

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

ParameterGradients::ParameterGradients(const Activation& x, RequestedGradients wanted)
    : options_(parameter_options(x.tensor)) {
  const auto size = static_cast<std::int64_t>(x.shape.channels);
  const auto on_cpu = options_.device(at::kCPU);
  if (wanted.weight) weight_ = at::empty({size}, on_cpu);
  if (wanted.bias) bias_ = at::empty({size}, on_cpu);
}

void ParameterGradients::compute(const Tensor& sums, Channels channels, const Tensor& statistics) {
  const double* const sum_dy = data(sums);
  const double* const sum_dy_xmu = sum_dy + channels.count;
  const double* const invstd = data(statistics) + 1 + channels_of(statistics) + channels.first;
  // Written by hand: a libtorch operation costs as much as a small layer's kernel.
  const auto fill = [channels](const Tensor& gradient, const auto& value_of) {
    if (!gradient.defined()) return;
    AT_DISPATCH_FLOATING_TYPES(gradient.scalar_type(), "sync_batch_norm_backward", [&] {
      scalar_t* const to = gradient.data_ptr<scalar_t>() + channels.first;
      for (std::size_t c = 0; c < channels.count; ++c) to[c] = static_cast<scalar_t>(value_of(c));
    });
  };
  fill(weight_, [&](std::size_t c) { return sum_dy_xmu[c] * invstd[c]; });
  fill(bias_, [&](std::size_t c) { return sum_dy[c]; });
}

BatchNormGradients ParameterGradients::finish(Tensor dx) {
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

Tensor batch_norm_forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                          BatchNormRecord& record) {
  const TraceScope scope("SyncBatchNorm forward");
  const at::AutoDispatchBelowADInplaceOrView without_history;  // the autograd function is the node
  const BatchNormSettings& settings = record.settings;
  Activation x;
  Tensor output;
  bool at_once = true;  // all channels in one message
  settings.layer.collective().run([&] {
    x = activation_of(input);
    const std::size_t all = x.shape.channels;
    record.channels_per_message = agree_on_channels(fitting_channels(x), all, settings.layer);
    at_once = record.channels_per_message == all;
    output = at::empty_like(x.tensor);
    if (at_once) {
      record.statistics = local_statistics(x, x.all());
      merge_across_ranks(record.statistics, settings.layer);
      return;
    }
    record.statistics = doubles(1 + 2 * static_cast<std::int64_t>(all));
    data(record.statistics)[0] = 0;  // if there are no channels
    for_each_message(all, record.channels_per_message, [&](Channels channels) {
      Tensor merged = local_statistics(x, channels);
      merge_across_ranks(merged, settings.layer);
      data(record.statistics)[0] = data(merged)[0];
      copy_channels(data(merged) + 1, channels, all, data(record.statistics) + 1);
      m2_to_invstd({data(merged) + 1 + channels.count, channels.count}, data(merged)[0], settings);
      normalize(x, channels, merged, weight, bias, output);
    });
  });
  record.nonfinite = finish_statistics(record.statistics, settings, input.sizes());
  record.for_kernels = {for_kernels(x, record.statistics)};
  if (at_once) normalize(x, x.all(), record.for_kernels.front(), weight, bias, output);
  return output;
}

std::vector<BatchNormGradients> batch_norm_backward(std::span<const BatchNormBackwardPiece> pieces,
                                                    const BatchNormRecord& record,
                                                    const Tensor& means) {
  const TraceScope scope("SyncBatchNorm backward");
  const bool wants_input = pieces.front().wanted.input;
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
                     {x, piece.wanted}});
    }
    const std::size_t n_channels = all.front().x.shape.channels;
    const double* const invstd = data(record.statistics) + 1 + n_channels;
    for_each_message(n_channels, record.channels_per_message, [&](Channels channels) {
      Tensor message;
      for (std::size_t i = 0; i < all.size(); ++i) {
        Piece& piece = all[i];
        const Tensor sums = sum_gradients(piece.dy, piece.x, channels, record.for_kernels[i]);
        piece.parameters.compute(sums, channels, record.statistics);
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
  return wants_input ? record.settings.layer.collective().run(run) : run();
}

}  // namespace lockstep::nn
