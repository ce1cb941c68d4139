#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <lockstep/nn/checkpoint.hpp>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace lockstep::nn {

/// Notices gradients of the parameters of modules that no optimizer of the parts steps: if another
/// one does, its state is lost with each rank. A target network requires gradients and never gets
/// one, so only a gradient counts.
class GradientWatch {
 public:
  GradientWatch(std::span<const TrainingPart> parts, std::span<const at::Tensor> by_hand);
  ~GradientWatch();
  GradientWatch(const GradientWatch&) = delete;
  GradientWatch& operator=(const GradientWatch&) = delete;

  /// Also parameters that require gradients since the last call.
  void update();
  /// Of one that has got a gradient; undefined if there is none.
  at::Tensor found() const;

 private:
  struct Watched {
    at::Tensor parameter;
    unsigned hook = 0;
    bool has_hook = false;
    std::shared_ptr<std::atomic<bool>> has_gradient = std::make_shared<std::atomic<bool>>(false);
  };
  std::vector<Watched> watched_;
};

}  // namespace lockstep::nn
