#include "nn/elastic/gradient_watch.hpp"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>

namespace lockstep::nn {

GradientWatch::GradientWatch(std::span<const TrainingPart> parts,
                             std::span<const at::Tensor> by_hand) {
  std::vector<at::Tensor> stepped(by_hand.begin(), by_hand.end());
  for (const TrainingPart& part : parts) {
    if (part.optimizer() == nullptr) continue;
    for (const auto& group : part.optimizer()->param_groups()) {
      stepped.insert(stepped.end(), group.params().begin(), group.params().end());
    }
  }
  for (const TrainingPart& part : parts) {
    if (part.module() == nullptr) continue;
    for (const at::Tensor& parameter : part.module()->parameters()) {
      const auto is_it = [&](const at::Tensor& other) { return other.is_same(parameter); };
      if (std::ranges::none_of(stepped, is_it)) watched_.push_back({.parameter = parameter});
    }
  }
}

GradientWatch::~GradientWatch() {
  for (Watched& each : watched_) {
    if (each.has_hook) each.parameter.remove_hook(each.hook);
  }
}

void GradientWatch::update() {
  for (Watched& each : watched_) {
    if (each.has_hook || !each.parameter.requires_grad()) continue;
    each.hook = each.parameter.register_hook(
        [noticed = each.has_gradient](const at::Tensor&) { noticed->store(true); });
    each.has_hook = true;
  }
}

at::Tensor GradientWatch::found() const {
  for (const Watched& each : watched_) {
    if (each.has_gradient->load()) return each.parameter;
  }
  return {};
}

}  // namespace lockstep::nn
