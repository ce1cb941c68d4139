#include "nn/batch_norm.hpp"

#include <ATen/Dispatch.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <lockstep/error.hpp>
#include <span>
#include <vector>

#include "nn/error.hpp"

namespace lockstep::nn {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

std::size_t channels_of(const Tensor& statistics) {
  return static_cast<std::size_t>(statistics.size(-1) - 1) / 2;
}

void update_running(const Tensor& running, double factor, const Tensor& values, double scale) {
  if (!running.defined()) return;
  Tensor updated = running.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  updated.mul_(1 - factor).add_(values.to(running.device()), factor * scale);
  running.copy_(updated);  // rounded once
}

bool is_16_bit(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

/// For ATen's kernels: C or 2C of our doubles beside x.
Tensor beside(const Tensor& x, const Tensor& values) { return values.to(parameter_options(x)); }

void check_state(const char* name, const Tensor& state, const Tensor& input,
                 std::int64_t num_features, const ErrorContext& context) {
  if (!state.defined()) return;
  const bool type_fits = state.scalar_type() == input.scalar_type() ||
                         (is_16_bit(input) && state.scalar_type() == at::kFloat);
  if (!type_fits || state.device() != input.device() || state.dim() != 1 ||
      state.size(0) != num_features) {
    throw UsageError(
        context,
        fmt::format("expected {} to be a {}{} tensor of {} elements on {}, as the input; got {} of "
                    "{} on {}: convert the module or the input with to()",
                    name, c10::toString(input.scalar_type()), is_16_bit(input) ? " or Float" : "",
                    num_features, input.device().str(), state.toString(), c10::str(state.sizes()),
                    state.device().str()));
  }
}

/// Autograd's own form of batch_norm_forward and batch_norm_backward.
class BatchNormFunction : public torch::autograd::Function<BatchNormFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& input,
                        const OptionalTensor& optional_weight, const OptionalTensor& optional_bias,
                        const c10::intrusive_ptr<BatchNormRecord>& record) {
    const Tensor weight = optional_weight.value_or(Tensor());
    Tensor output = batch_norm_forward(input, weight, optional_bias.value_or(Tensor()), *record);
    context->save_for_backward({input, weight});
    context->saved_data["record"] = c10::IValue::make_capsule(record);
    // Whether to communicate must not depend on what this rank asks of autograd, but on the graph
    // alone, which is the same on all ranks.
    context->saved_data["wanted"] = input.requires_grad();
    context->saved_data["has_weight"] = weight.defined();
    context->saved_data["has_bias"] = optional_bias.has_value();
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto hold = context->saved_data["record"].toCapsule();
    const auto& record = static_cast<const BatchNormRecord&>(*hold);
    const variable_list tensors = context->get_saved_variables();
    // Autograd numbers the tensors that were there.
    const bool has_weight = context->saved_data["has_weight"].toBool();
    const bool has_bias = context->saved_data["has_bias"].toBool();
    const BatchNormWanted wanted{context->saved_data["wanted"].toBool(),
                                 has_weight && context->needs_input_grad(1),
                                 has_bias && context->needs_input_grad(has_weight ? 2 : 1)};
    const auto result = batch_norm_backward(gradients[0], tensors[0], tensors[1], record, wanted);
    return {result.input, result.weight, result.bias, Tensor()};
  }
};

}  // namespace

at::TensorOptions parameter_options(const Tensor& input) {
  return at::TensorOptions(input.device())
      .dtype(is_16_bit(input) ? at::kFloat : input.scalar_type());
}

OptionalTensor parameter_for(const Tensor& parameter, const Tensor& input) {
  if (!parameter.defined()) return {};
  return parameter.to(parameter_options(input)).contiguous();
}

Tensor gradient_like(const Tensor& gradient, const Tensor& x) {
  if (gradient.strides() == x.strides() && gradient.scalar_type() == x.scalar_type()) {
    return gradient;
  }
  return at::empty_like(x).copy_(gradient);
}

Activation activation_of(const Tensor& original) {
  const bool widens = is_16_bit(original) && original.is_cpu();
  const Tensor input = widens ? original.to(at::kFloat) : original;
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
  const auto c = static_cast<std::int64_t>(x.shape.channels);
  const auto n = static_cast<double>(x.shape.n_per_channel());
  Tensor statistics = at::zeros({1 + 2 * c}, at::kDouble);
  double* const out = data(statistics);
  out[0] = n;
  if (x.tensor.is_cuda()) {
    if (x.tensor.numel() == 0) return statistics;  // ATen's kernels refuse it
    const auto [mean, var] = at::batch_norm_update_stats(x.tensor, {}, {}, /*momentum=*/0);
    statistics.narrow(0, 1, 2 * c).copy_(at::cat({mean, var}));
    statistics.narrow(0, 1 + c, c).mul_(n);
    return statistics;
  }
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

bool holds_nonfinite(const Tensor& statistics) {
  // The kernels leave such a channel's mean not finite.
  const std::span means(data(statistics) + 1, channels_of(statistics));
  return !std::all_of(means.begin(), means.end(), [](double mean) { return std::isfinite(mean); });
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
  const std::span m2s(data(statistics) + 1 + channels, channels);
  const bool keeps =
      settings.on_nonfinite == OnNonfinite::keep_running_stats && holds_nonfinite(statistics);
  if (n > 0 && !keeps) {
    const auto c = static_cast<std::int64_t>(channels);
    update_running(settings.running_mean, settings.factor, statistics.narrow(0, 1, c), 1);
    update_running(settings.running_var, settings.factor, statistics.narrow(0, 1 + c, c),
                   1 / (n - 1));
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

Tensor normalize(const Activation& x, const Tensor& statistics, const Tensor& weight,
                 const Tensor& bias) {
  Tensor output = at::empty_like(x.tensor);
  if (x.tensor.is_cuda()) {
    if (output.numel() == 0) return output;
    const auto [mean, invstd] = mean_and_invstd(beside(x.tensor, statistics));
    return at::batch_norm_elemt(x.tensor, weight, bias, mean, invstd, /*eps=*/0);
  }
  const double* const means = data(statistics) + 1;
  AT_DISPATCH_FLOATING_TYPES(x.tensor.scalar_type(), "sync_batch_norm", [&] {
    kernels::batch_norm_normalize(x.tensor.data_ptr<scalar_t>(), x.shape, means,
                                  means + x.shape.channels, data_or_null<scalar_t>(weight),
                                  data_or_null<scalar_t>(bias), output.data_ptr<scalar_t>());
  });
  return output;
}

Tensor sum_gradients(const Tensor& dy, const Activation& x, const Tensor& statistics) {
  const auto c = static_cast<std::int64_t>(x.shape.channels);
  Tensor sums = at::zeros({2 * c}, at::kDouble);
  if (x.tensor.is_cuda()) {
    if (dy.numel() == 0) return sums;
    const auto [mean, invstd] = mean_and_invstd(beside(x.tensor, statistics));
    const auto reduced = at::batch_norm_backward_reduce(
        dy, x.tensor, mean, invstd, {}, /*input_g=*/true, /*weight_g=*/false, /*bias_g=*/false);
    return sums.copy_(at::cat({std::get<0>(reduced), std::get<1>(reduced)}));
  }
  AT_DISPATCH_FLOATING_TYPES(x.tensor.scalar_type(), "sync_batch_norm_backward", [&] {
    kernels::batch_norm_backward_reduce(dy.data_ptr<scalar_t>(), x.tensor.data_ptr<scalar_t>(),
                                        x.shape, data(statistics) + 1, data(sums), data(sums) + c);
  });
  return sums;
}

Tensor input_gradient(const Tensor& dy, const Activation& x, const Tensor& statistics,
                      const Tensor& weight, const Tensor& mean_gradients) {
  Tensor dx = at::empty_like(x.tensor);
  if (x.tensor.is_cuda()) {
    if (dx.numel() == 0) return dx;
    const auto [mean, invstd] = mean_and_invstd(beside(x.tensor, statistics));
    const auto gradients = beside(x.tensor, mean_gradients).chunk(2);
    // The kernel divides what it is given by the count: these are means already.
    const Tensor count = at::ones({1}, x.tensor.options().dtype(at::kInt));
    return at::batch_norm_backward_elemt(dy, x.tensor, mean, invstd, weight, gradients[0],
                                         gradients[1], count);
  }
  const std::size_t c = x.shape.channels;
  const double* const means = data(statistics) + 1;
  AT_DISPATCH_FLOATING_TYPES(x.tensor.scalar_type(), "sync_batch_norm_backward", [&] {
    kernels::batch_norm_backward_elementwise(dy.data_ptr<scalar_t>(), x.tensor.data_ptr<scalar_t>(),
                                             x.shape, means, means + c,
                                             data_or_null<scalar_t>(weight), data(mean_gradients),
                                             data(mean_gradients) + c, dx.data_ptr<scalar_t>());
  });
  return dx;
}

BatchNormGradients parameter_gradients(const Tensor& sums, const Activation& x,
                                       const Tensor& statistics, BatchNormWanted wanted) {
  const auto parts = sums.chunk(2);  // dy, dy * (x - mean)
  const auto options = parameter_options(x.tensor);
  BatchNormGradients result;
  if (wanted.weight) result.weight = (parts[1] * mean_and_invstd(statistics).invstd).to(options);
  if (wanted.bias) result.bias = parts[0].to(options, /*non_blocking=*/false, /*copy=*/true);
  return result;
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

void check_batch_norm(const Tensor& input, std::int64_t num_features, const Tensor& weight,
                      const Tensor& bias, const BatchNormSettings& settings,
                      const ErrorContext& context) {
  if (!(input.is_cpu() || input.is_cuda()) || input.layout() != at::kStrided) {
    throw UsageError(context, fmt::format("expected a dense CPU or CUDA tensor, got {}: move it "
                                          "there with to()",
                                          input.toString()));
  }
  if (!input.is_floating_point()) {
    throw UsageError(context,
                     fmt::format("expected input of float64, float32, bfloat16 or float16, got {}: "
                                 "convert it with to()",
                                 c10::toString(input.scalar_type())));
  }
  if (input.size(1) != num_features) {
    throw UsageError(context, fmt::format("expected {} channels, got input size {}", num_features,
                                          c10::str(input.sizes())));
  }
  check_state("weight", weight, input, num_features, context);
  check_state("bias", bias, input, num_features, context);
  check_state("running_mean", settings.running_mean, input, num_features, context);
  check_state("running_var", settings.running_var, input, num_features, context);
}

Tensor batch_norm_forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                          BatchNormRecord& record) {
  const Activation x = activation_of(input);
  record.shape = x.shape;
  record.statistics = merge_over(local_statistics(x), record.settings.group);
  finish_statistics(record.statistics, record.settings, input.sizes());
  return normalize(x, record.statistics, weight, bias).to(input.scalar_type());
}

BatchNormGradients batch_norm_backward(const Tensor& gradient, const Tensor& input,
                                       const Tensor& weight, const BatchNormRecord& record,
                                       BatchNormWanted wanted) {
  refuse_create_graph(record.settings.group);
  const Activation x = activation_of(input);
  const Tensor dy = gradient_like(gradient, x.tensor);
  const Tensor message = sum_gradients(dy, x, record.statistics);
  BatchNormGradients result = parameter_gradients(message, x, record.statistics, wanted);
  if (!wanted.input) return result;
  average_gradient(message, mean_and_invstd(record.statistics).invstd, data(record.statistics)[0],
                   record.settings);
  result.input = input_gradient(dy, x, record.statistics, weight, message).to(input.scalar_type());
  return result;
}

Tensor synchronised_batch_norm(const Tensor& input, const Tensor& weight, const Tensor& bias,
                               const c10::intrusive_ptr<BatchNormRecord>& record) {
  return BatchNormFunction::apply(input, parameter_for(weight, input), parameter_for(bias, input),
                                  record);
}

}  // namespace lockstep::nn
