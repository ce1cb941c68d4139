#include <lockstep/error.hpp>
#include <span>
#include <vector>

#include "kernels/batch_norm.hpp"
#include "nn/batch_norm/layer_steps.hpp"

namespace lockstep::nn {

using at::Tensor;

namespace {

/// Doubles in a DType::moments.
constexpr std::size_t kMoments = size_of(DType::moments) / sizeof(double);

/// Parts of 1 + 2C doubles, merged in order.
Tensor merge(std::span<const double> parts, std::size_t stride) {
  const std::size_t n_parts = parts.size() / stride;
  const std::size_t channels = (stride - 1) / 2;
  Tensor merged = doubles(static_cast<std::int64_t>(stride));
  double* const out = data(merged);
  std::vector<double> counts(n_parts);
  out[0] = 0;
  for (std::size_t part = 0; part < n_parts; ++part) {
    counts[part] = parts[part * stride];
    out[0] += counts[part];
  }
  kernels::batch_norm_merge(static_cast<int>(n_parts), counts.data(), parts.data() + 1,
                            parts.data() + 1 + channels, stride, channels, out + 1,
                            out + 1 + channels);
  return merged;
}

/// merge_over as one reduction, whose bytes do not grow with the number of ranks.
Tensor reduce_moments(const Tensor& mine, const Layer& layer) {
  const std::size_t channels = (static_cast<std::size_t>(mine.numel()) - 1) / 2;
  std::vector<double> moments(kMoments * channels);
  const double* const from = data(mine) + 1;
  for (std::size_t c = 0; c < channels; ++c) {
    double* const channel = moments.data() + kMoments * c;
    channel[0] = from[-1];
    channel[1] = from[c];
    channel[2] = from[channels + c];
  }
  layer.communicate(kForward, [&] {
    layer.group.all_reduce({moments.data(), channels, DType::moments}, ReduceOp::sum, Deadline(),
                           layer.where);
  });
  Tensor merged = doubles(mine.numel());
  double* const to = data(merged) + 1;
  to[-1] = channels > 0 ? moments[0] : 0;
  for (std::size_t c = 0; c < channels; ++c) {
    const double* const channel = moments.data() + kMoments * c;
    to[c] = channel[1];
    to[channels + c] = channel[2];
  }
  return merged;
}

}  // namespace

Tensor merge_statistics(const Tensor& parts) {
  const auto stride = static_cast<std::size_t>(parts.size(-1));
  return merge({data(parts), static_cast<std::size_t>(parts.numel())}, stride);
}

Tensor merge_over(const Tensor& mine, const Layer& layer) {
  if (layer.group.reduces_moments()) return reduce_moments(mine, layer);
  const auto stride = static_cast<std::size_t>(mine.numel());
  std::vector<double> all(stride * static_cast<std::size_t>(layer.group.size()));
  layer.communicate(kForward, [&] {
    layer.group.all_gather({data(mine), stride, DType::f64}, {all.data(), all.size(), DType::f64},
                           Deadline(), layer.where);
  });
  return merge(all, stride);
}

}  // namespace lockstep::nn
