#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <lockstep/error.hpp>
#include <lockstep/trace.hpp>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "group/native_engine.hpp"
#include "kernels/batch_norm.hpp"
#include "kernels/isa.hpp"
#include "nn/batch_norm/cuda_batch_norm.hpp"
#include "nn/batch_norm/layer_steps.hpp"
#include "nn/elements/dense.hpp"

namespace lockstep::nn {

using at::Tensor;

namespace {

std::size_t channels_of(const Tensor& statistics) {
  return static_cast<std::size_t>(statistics.size(-1) - 1) / 2;
}

void check_state(const char* name, const Tensor& state, const Tensor& input,
                 std::int64_t num_features, const Layer& layer) {
  if (!state.defined()) return;
  const bool type_fits = state.scalar_type() == input.scalar_type() ||
                         (is_16_bit(input) && state.scalar_type() == at::kFloat);
  if (!type_fits || state.device() != input.device() || state.dim() != 1 ||
      state.size(0) != num_features) {
    throw UsageError(
        layer.context(kForward),
        fmt::format("expected {} to be a {}{} tensor of {} elements on {}, as the input; got {} of "
                    "{} on {}: convert the module or the input with to()",
                    name, c10::toString(input.scalar_type()), is_16_bit(input) ? " or Float" : "",
                    num_features, input.device().str(), state.toString(), c10::str(state.sizes()),
                    state.device().str()));
  }
}

/// Doubles in an element of the type.
constexpr std::size_t kMoments = size_of(lockstep::detail::kMoments) / sizeof(double);

/// Parts of 1 + 2C doubles, merged in order into as many of `merged`.
void merge(std::span<const double> parts, const Tensor& merged) {
  const auto stride = static_cast<std::size_t>(merged.numel());
  const std::size_t n_parts = parts.size() / stride;
  const std::size_t channels = (stride - 1) / 2;
  double* const out = data(merged);
  c10::SmallVector<double, 16> counts(n_parts);
  out[0] = 0;
  for (std::size_t part = 0; part < n_parts; ++part) {
    counts[part] = parts[part * stride];
    out[0] += counts[part];
  }
  kernels::batch_norm_merge(static_cast<int>(n_parts), counts.data(), parts.data() + 1,
                            parts.data() + 1 + channels, stride, channels, out + 1,
                            out + 1 + channels);
}

/// merge_across_ranks as one reduction, whose bytes do not grow with the number of ranks.
void reduce_moments(const Tensor& mine, const Layer& layer) {
  const std::size_t channels = (static_cast<std::size_t>(mine.numel()) - 1) / 2;
  std::vector<double> moments(kMoments * channels);
  double* const own = data(mine) + 1;
  for (std::size_t c = 0; c < channels; ++c) {
    double* const channel = moments.data() + kMoments * c;
    channel[0] = own[-1];
    channel[1] = own[c];
    channel[2] = own[channels + c];
  }
  layer.all_reduce(kForward, {moments.data(), channels, lockstep::detail::kMoments}, ReduceOp::sum);
  own[-1] = channels > 0 ? moments[0] : 0;
  for (std::size_t c = 0; c < channels; ++c) {
    const double* const channel = moments.data() + kMoments * c;
    own[c] = channel[1];
    own[channels + c] = channel[2];
  }
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

}  // namespace

void check_batch_norm(const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const BatchNormSettings& settings) {
  const std::int64_t num_features = settings.layer.n_channels;
  const auto reject = [&settings](const std::string& text) {
    throw UsageError(settings.layer.context(kForward), text);
  };
  if (input.dim() < 2) {
    reject(fmt::format("expected input of 2 or more dimensions, got {}D", input.dim()));
  }
  if (!(input.is_cpu() || input.is_cuda()) || input.layout() != at::kStrided) {
    reject(fmt::format("expected a dense CPU or CUDA tensor, got {}: move it there with to()",
                       input.toString()));
  }
  if (!input.is_floating_point()) {
    reject(
        fmt::format("expected input of float64, float32, bfloat16 or float16, got {}: convert "
                    "it with to()",
                    c10::toString(input.scalar_type())));
  }
  if (input.size(1) != num_features) {
    reject(fmt::format("expected {} channels, got input size {}", num_features,
                       c10::str(input.sizes())));
  }
  check_state("weight", weight, input, num_features, settings.layer);
  check_state("bias", bias, input, num_features, settings.layer);
  for (const auto& [name, running] : {std::pair("running_mean", settings.running_mean),
                                      std::pair("running_var", settings.running_var)}) {
    check_state(name, running, input, num_features, settings.layer);
    if (!running.defined() || !running._is_zerotensor()) continue;
    reject(
        fmt::format("{} is a zero tensor (_efficientzerotensor), which has no memory for new "
                    "values: pass a clone() of it",
                    name));
  }
}

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

Tensor merge_statistics(const Tensor& parts) {
  Tensor merged = doubles(parts.size(-1));
  merge({data(parts), static_cast<std::size_t>(parts.numel())}, merged);
  return merged;
}

void merge_across_ranks(Tensor& mine, const Layer& layer) {
  if (internal::NativeGroup::reduces_moments(layer.group)) return reduce_moments(mine, layer);
  const auto stride = static_cast<std::size_t>(mine.numel());
  const std::size_t n_all = stride * static_cast<std::size_t>(layer.group.size());
  const auto all = std::make_unique_for_overwrite<double[]>(n_all);
  layer.all_gather(kForward, {data(mine), stride, DType::f64}, {all.get(), n_all, DType::f64});
  merge({all.get(), n_all}, mine);
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

Tensor batch_norm_forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                          BatchNormRecord& record) {
  const TraceScope scope("SyncBatchNorm forward");
  const at::AutoDispatchBelowADInplaceOrView without_history;  // the autograd function is the node
  const BatchNormSettings& settings = record.settings;
  Activation x;
  Tensor output;
  bool at_once = true;  // all channels in one message
  settings.layer.guard([&] {
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

void begin_batch(const Tensor& input, const Tensor& weight, const Tensor& bias,
                 BatchNormSettings& settings) {
  settings.layer.guard([&] {
    check_batch_norm(input, weight, bias, settings);
    if (settings.momentum.has_value()) {
      settings.factor = *settings.momentum;
    } else if (settings.num_batches_tracked.defined()) {
      settings.factor = 1 / (settings.num_batches_tracked.item<double>() + 1);
    }
  });
}

void count_batch(const BatchNormRecord& record) {
  Tensor n_batches = record.settings.num_batches_tracked;
  const bool keeps =
      record.nonfinite && record.settings.on_nonfinite == OnNonfinite::keep_running_stats;
  if (!n_batches.defined() || keeps) return;
  if (n_batches.is_cpu() && n_batches.scalar_type() == at::kLong && n_batches.numel() == 1 &&
      has_values_in_memory(n_batches)) {
    ++*n_batches.data_ptr<std::int64_t>();  // by libtorch's addition it takes microseconds
    n_batches.unsafeGetTensorImpl()->bump_version();  // as every operation in place does
  } else {
    n_batches += 1;
  }
}

}  // namespace lockstep::nn
