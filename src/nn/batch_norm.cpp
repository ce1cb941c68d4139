#include "nn/batch_norm.hpp"

#include <ATen/Dispatch.h>

#include <algorithm>
#include <cmath>
#include <lockstep/error.hpp>
#include <span>
#include <vector>

#include "nn/error.hpp"

namespace lockstep::nn {

using at::Tensor;

namespace {

std::size_t channels_of(const Tensor& statistics) {
  return static_cast<std::size_t>(statistics.size(-1) - 1) / 2;
}

void update_running(const Tensor& running, double factor, std::span<const double> values,
                    double scale) {
  if (!running.defined()) return;
  AT_DISPATCH_FLOATING_TYPES(running.scalar_type(), "sync_batch_norm", [&] {
    auto out = running.accessor<scalar_t, 1>();
    for (std::size_t c = 0; c < values.size(); ++c) {
      auto& value = out[static_cast<std::int64_t>(c)];
      value = static_cast<scalar_t>((1 - factor) * static_cast<double>(value) +
                                    factor * values[c] * scale);
    }
  });
}

}  // namespace

Activation activation_of(const Tensor& input) {
  const auto outer = static_cast<std::size_t>(input.size(0));
  const auto channels = static_cast<std::size_t>(input.size(1));
  std::size_t inner = 1;
  for (const auto size : input.sizes().slice(2)) inner *= static_cast<std::size_t>(size);
  if (!input.is_contiguous() && input.movedim(1, -1).is_contiguous()) {
    return {input, {outer * inner, channels, 1}};
  }
  return {input.contiguous(), {outer, channels, inner}};
}

Tensor local_statistics(const Activation& x) {
  Tensor statistics = doubles(static_cast<std::int64_t>(1 + 2 * x.shape.channels));
  double* const out = data(statistics);
  out[0] = static_cast<double>(x.shape.n_per_channel());
  AT_DISPATCH_FLOATING_TYPES(x.tensor.scalar_type(), "sync_batch_norm", [&] {
    kernels::batch_norm_stats(x.tensor.data_ptr<scalar_t>(), x.shape, out + 1,
                              out + 1 + x.shape.channels);
  });
  return statistics;
}

Tensor merge_statistics(const Tensor& parts) {
  const auto n_parts = static_cast<std::size_t>(parts.size(0));
  const auto stride = static_cast<std::size_t>(parts.size(1));
  const std::size_t channels = channels_of(parts);
  const double* const all = data(parts);
  Tensor merged = doubles(parts.size(1));
  double* const out = data(merged);
  std::vector<double> counts(n_parts);
  out[0] = 0;
  for (std::size_t part = 0; part < n_parts; ++part) {
    counts[part] = all[part * stride];
    out[0] += counts[part];
  }
  kernels::batch_norm_merge(static_cast<int>(n_parts), counts.data(), all + 1, all + 1 + channels,
                            stride, channels, out + 1, out + 1 + channels);
  return merged;
}

Tensor merge_over(const Tensor& mine, const Group& group) {
  const Tensor all = at::empty({group.size(), mine.size(0)}, at::kDouble);
  group.all_gather({data(mine), static_cast<std::size_t>(mine.numel()), DType::f64},
                   {data(all), static_cast<std::size_t>(all.numel()), DType::f64});
  return merge_statistics(all);
}

void finish_statistics(const Tensor& statistics, const BatchNormSettings& settings,
                       at::IntArrayRef input_sizes) {
  const double n = data(statistics)[0];
  if (n == 1) {
    throw UsageError(context_of("SyncBatchNorm", settings.group, std::source_location::current()),
                     "Expected more than 1 value per channel when training, got input size " +
                         c10::str(input_sizes));
  }
  const std::size_t channels = channels_of(statistics);
  const std::span means(data(statistics) + 1, channels);
  const std::span m2s(data(statistics) + 1 + channels, channels);
  if (n > 0) {
    update_running(settings.running_mean, settings.factor, means, 1);
    update_running(settings.running_var, settings.factor, m2s, 1 / (n - 1));
  }
  for (double& value : m2s) {
    const double var = value / n;
    switch (settings.eps_mode) {
      case EpsMode::plus: value = 1 / std::sqrt(var + settings.eps); break;
      // Written so that a NaN stays one.
      case EpsMode::clamp: value = 1 / std::sqrt(var < settings.eps ? settings.eps : var); break;
    }
  }
}

void normalize(const Activation& x, const Tensor& statistics, const Tensor& weight,
               const Tensor& bias, const Tensor& output) {
  const double* const means = data(statistics) + 1;
  AT_DISPATCH_FLOATING_TYPES(x.tensor.scalar_type(), "sync_batch_norm", [&] {
    kernels::batch_norm_normalize(x.tensor.data_ptr<scalar_t>(), x.shape, means,
                                  means + x.shape.channels, data_or_null<scalar_t>(weight),
                                  data_or_null<scalar_t>(bias), output.data_ptr<scalar_t>());
  });
}

void average_gradient(const Tensor& message, const Tensor& invstd, double count,
                      const BatchNormSettings& settings) {
  const auto channels = static_cast<std::size_t>(invstd.numel());
  settings.group.all_reduce({data(message), 2 * channels, DType::f64});
  if (count > 0) message.div_(count);
  if (settings.eps_mode == EpsMode::plus) return;
  // A clamped variance is a constant: what goes back through it is nothing.
  const double of_clamped = 1 / std::sqrt(settings.eps);
  for (std::size_t c = 0; c < channels; ++c) {
    if (data(invstd)[c] == of_clamped) data(message)[channels + c] = 0;
  }
}

void refuse_create_graph(const Group& group) {
  if (!at::GradMode::is_enabled()) return;
  throw UsageError(context_of("SyncBatchNorm", group, std::source_location::current()),
                   "gradients of gradients are not supported: call backward or grad without "
                   "create_graph");
}

}  // namespace lockstep::nn
