#include <c10/util/SmallVector.h>

#include <lockstep/error.hpp>
#include <memory>
#include <span>
#include <vector>

#include "group/native_engine.hpp"
#include "kernels/batch_norm.hpp"
#include "nn/batch_norm/layer_steps.hpp"

namespace lockstep::nn {

using at::Tensor;

namespace {

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

}  // namespace

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

}  // namespace lockstep::nn
