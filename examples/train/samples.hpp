#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>

#include "train/data.hpp"

namespace train {

/// Images and labels as tensor views of the data set's bytes, which must outlive this object, and
/// their conversion to a network's input.
class Samples {
 public:
  /// Normalises each channel with the mean and standard deviation over `scaled_by`.
  Samples(const Images& images, const Images& scaled_by, torch::Dtype dtype);

  struct Batch {
    torch::Tensor input;   ///< (n, channels, height, width)
    torch::Tensor labels;  ///< (n), i64
  };
  Batch batch(std::span<const std::int64_t> indices) const;

 private:
  torch::Tensor pixels_;
  torch::Tensor labels_;
  torch::Dtype dtype_;
  torch::Tensor mean_;
  torch::Tensor deviation_;
};

}  // namespace train
