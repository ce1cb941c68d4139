#include "nn/elastic/parameter_samples.hpp"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>

namespace lockstep::nn {
namespace {

constexpr std::int64_t kSamples = 16;

std::int64_t stride_of_samples(const at::Tensor& parameter) {
  return std::max<std::int64_t>(parameter.numel() / kSamples, 1);
}

bool is_sampled(const at::Tensor& parameter) {
  return parameter.is_cpu() && parameter.layout() == at::kStrided &&
         parameter.is_non_overlapping_and_dense();
}

void append_samples(const at::Tensor& parameter, std::vector<std::byte>& bytes) {
  if (!is_sampled(parameter)) return;
  const auto* const data = static_cast<const std::byte*>(parameter.data_ptr());
  const std::int64_t n_bytes = static_cast<std::int64_t>(parameter.element_size());
  const std::int64_t stride = stride_of_samples(parameter);
  for (std::int64_t i = 0; i < parameter.numel(); i += stride) {
    bytes.insert(bytes.end(), data + i * n_bytes, data + (i + 1) * n_bytes);
  }
}

/// A group's, if its optimizer tells it.
std::optional<double> rate_of(const torch::optim::OptimizerParamGroup& group) {
  try {
    if (group.has_options()) return group.options().get_lr();
  } catch (const c10::Error&) {  // an optimizer of the program's own may not
  }
  return std::nullopt;
}

}  // namespace

void ParameterSamples::take(std::span<const at::Tensor> parameters) {
  bytes_.clear();
  for (const at::Tensor& parameter : parameters) append_samples(parameter, bytes_);
}

bool ParameterSamples::have_changed(std::span<const at::Tensor> parameters) const {
  ParameterSamples now;
  now.take(parameters);
  return now.bytes_ != bytes_;
}

at::Tensor find_large_gradient(const torch::optim::Optimizer& optimizer) {
  const at::NoGradGuard no_graph;
  at::Tensor found;
  for (const auto& group : optimizer.param_groups()) {
    const std::optional<double> rate = rate_of(group);
    for (const at::Tensor& parameter : group.params()) {
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined() || gradient.layout() != at::kStrided || !is_sampled(parameter)) {
        continue;
      }
      if (!at::isfinite(gradient).all().item<bool>()) return {};
      if (found.defined() || !rate || !at::isFloatingType(parameter.scalar_type())) continue;
      if (!parameter.is_contiguous() || !gradient.is_contiguous()) continue;
      const std::int64_t stride = stride_of_samples(parameter);
      const auto samples_of = [stride](const at::Tensor& all) {
        return all.detach().view(-1).slice(0, 0, all.numel(), stride).to(at::kDouble).abs();
      };
      // Beyond rounding, also where an optimizer divides by a history of larger gradients.
      const double epsilon = parameter.scalar_type() == at::kBFloat16 ? 0x1p-7
                             : parameter.scalar_type() == at::kHalf   ? 0x1p-10
                                                                      : 0;
      const double least = std::max(1e-5, 4 * epsilon);
      const at::Tensor changes = samples_of(gradient) * *rate;
      if ((changes > samples_of(parameter) * least).any().item<bool>()) found = parameter;
    }
  }
  return found;
}

}  // namespace lockstep::nn
