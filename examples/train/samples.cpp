#include "train/samples.hpp"

#include <torch/torch.h>

#include <cmath>
#include <vector>

namespace train {
namespace {

template <class T>
torch::Tensor view_of(std::span<const T> data, std::vector<std::int64_t> sizes) {
  return torch::from_blob(const_cast<T*>(data.data()), sizes, c10::CppTypeToScalarType<T>::value);
}

std::int64_t size_in(std::size_t n) { return static_cast<std::int64_t>(n); }

struct Scale {
  std::vector<double> means;
  std::vector<double> deviations;
};

/// The scale of each channel. Integer sums are exact, so every machine gets the same result.
Scale scale_of(const Images& images) {
  Scale scale;
  const std::size_t plane = images.height * images.width;
  const auto n = static_cast<double>(plane * images.size());
  for (std::size_t channel = 0; channel < images.channels; ++channel) {
    std::uint64_t sum = 0;
    std::uint64_t squares = 0;
    for (std::size_t i = 0; i < images.size(); ++i) {
      const std::size_t first = (i * images.channels + channel) * plane;
      for (const std::uint64_t pixel : std::span(images.pixels).subspan(first, plane)) {
        sum += pixel;
        squares += pixel * pixel;
      }
    }
    const double mean = static_cast<double>(sum) / n;
    const double variance = static_cast<double>(squares) / n - mean * mean;
    scale.means.push_back(mean);
    scale.deviations.push_back(variance > 0 ? std::sqrt(variance) : 1.0);
  }
  return scale;
}

}  // namespace

Samples::Samples(const Images& images, const Images& scaled_by, torch::Dtype dtype)
    : pixels_(
          view_of<std::uint8_t>(images.pixels, {size_in(images.size()), size_in(images.channels),
                                                size_in(images.height), size_in(images.width)})),
      labels_(view_of<std::uint8_t>(images.labels, {size_in(images.size())})),
      dtype_(dtype) {
  const Scale scale = scale_of(scaled_by);
  mean_ = torch::tensor(scale.means, torch::kFloat64).to(dtype).view({1, -1, 1, 1});
  deviation_ = torch::tensor(scale.deviations, torch::kFloat64).to(dtype).view({1, -1, 1, 1});
}

Samples::Batch Samples::batch(std::span<const std::int64_t> indices) const {
  const torch::Tensor index = view_of(indices, {size_in(indices.size())});
  return {pixels_.index_select(0, index).to(dtype_).sub_(mean_).div_(deviation_),
          labels_.index_select(0, index).to(torch::kInt64)};
}

}  // namespace train
