#include "nn/batch_norm/cpu_batch_norm.hpp"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "kernels/isa.hpp"

/// Work is divided among threads in two ways. If the values of a channel lie in runs: by channels.
/// Otherwise by rows, each of which has all channels; sums over rows are then made in parts that
/// depend only on the shape, and combined in order.
namespace lockstep::nn::cpu {
namespace {

using at::Tensor;
using kernels::BatchNormShape;

constexpr std::size_t kPartValues = std::size_t{1} << 18U;
constexpr std::size_t kMostParts = 64;

/// Some channels of an activation, or some rows of it.
struct Piece {
  BatchNormShape shape;
  std::size_t at = 0;       ///< its first value
  std::size_t channel = 0;  ///< its first channel
};

Piece channels_of(BatchNormShape shape, std::size_t first, std::size_t n) {
  return {{shape.outer, n, shape.inner, shape.channels}, first * shape.inner, first};
}

Piece rows_of(BatchNormShape shape, std::size_t first, std::size_t n) {
  return {{n, shape.channels, shape.inner}, first * shape.channels * shape.inner, 0};
}

/// Calls f(piece, offset of its first channel in the per-channel arrays).
template <class F>
void for_each_piece(BatchNormShape shape, Channels channels, const F& f) {
  // By reference: a std::function would allocate a copy of what they capture.
  const auto by_channels = [&](std::size_t first, std::size_t n) {
    f(channels_of(shape, channels.first + first, n), first);
  };
  const auto by_rows = [&](std::size_t first, std::size_t n) {
    f(rows_of(shape, first, n), /*offset=*/0);
  };
  if (is_divisible(shape)) {
    in_parallel(channels.count, shape.n_per_channel(), std::cref(by_channels));
  } else {
    in_parallel(shape.outer, shape.channels * shape.inner, std::cref(by_rows));
  }
}

void fill_zeros(Channels channels, double* first, double* second) {
  std::fill_n(first, channels.count, 0);
  std::fill_n(second, channels.count, 0);
}

/// The kernels' types for libtorch's.
template <class T>
struct KernelType {
  using Type = T;
};
template <>
struct KernelType<at::Half> {
  using Type = Float16;
};
template <>
struct KernelType<at::BFloat16> {
  using Type = BFloat16;
};

template <class T>
auto* values_of(const Tensor& tensor) {
  return reinterpret_cast<typename KernelType<T>::Type*>(tensor.data_ptr<T>());
}

template <class T>
const T* data_or_null(const Tensor& tensor, std::size_t offset) {
  return tensor.defined() ? tensor.data_ptr<T>() + offset : nullptr;
}

/// For the output of a pass over n_tensors of its size: streaming if it would not stay in a cache.
kernels::Stores stores_for(const Tensor& output, std::size_t n_tensors) {
  return n_tensors * output.nbytes() > kernels::kCaches.streaming_bytes ? kernels::Stores::streaming
                                                                        : kernels::Stores::cached;
}

std::size_t n_parts_of(BatchNormShape shape) {
  return std::clamp<std::size_t>(shape.outer * shape.channels * shape.inner / kPartValues, 1,
                                 kMostParts);
}

/// Rows in parts, each with two sums per channel.
struct Parts {
  explicit Parts(BatchNormShape s)
      : shape(s),
        n(n_parts_of(s)),
        rows((s.outer + n - 1) / n),
        count(n),
        first(n * s.channels),
        second(n * s.channels) {}

  /// Calls f(piece, its first sums, its second sums).
  template <class F>
  void for_each(const F& f) {
    in_parallel(n, rows * shape.channels * shape.inner, [&](std::size_t begin, std::size_t n_mine) {
      for (std::size_t part = begin; part < begin + n_mine; ++part) {
        const std::size_t row = std::min(part * rows, shape.outer);
        const Piece piece = rows_of(shape, row, std::min(rows, shape.outer - row));
        count[part] = static_cast<double>(piece.shape.n_per_channel());
        f(piece, first.data() + part * shape.channels, second.data() + part * shape.channels);
      }
    });
  }

  BatchNormShape shape;
  std::size_t n;
  std::size_t rows;
  std::vector<double> count, first, second;
};

}  // namespace

// at::parallel_for is a template: serial if its caller is compiled without OpenMP, and on a second
// set of threads with an OpenMP other than libtorch's. The loop of a TensorIterator, here over the
// numbers of the parts, runs inside libtorch.
void in_parallel(std::size_t n, std::size_t n_values,
                 const std::function<void(std::size_t first, std::size_t n)>& f) {
  const auto grain = std::max<std::int64_t>(
      1, at::internal::GRAIN_SIZE / static_cast<std::int64_t>(std::max<std::size_t>(1, n_values)));
  const auto end = static_cast<std::int64_t>(n);
  if (end <= grain || at::get_num_threads() == 1) return f(0, n);
  const at::Tensor numbers = at::arange(end, at::kLong);
  auto iterator = at::TensorIteratorConfig().add_input(numbers).build();
  iterator.for_each(
      [&f](char** data, const std::int64_t* /*strides*/, std::int64_t n_numbers) {
        const auto first = *reinterpret_cast<const std::int64_t*>(data[0]);
        f(static_cast<std::size_t>(first), static_cast<std::size_t>(n_numbers));
      },
      grain);
}

bool is_divisible(BatchNormShape shape) { return shape.inner >= kernels::kLongRun; }

void stats(const Tensor& x, BatchNormShape shape, Channels channels, double* mean, double* m2) {
  if (shape.n_per_channel() == 0) return fill_zeros(channels, mean, m2);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, x.scalar_type(), "sync_batch_norm", [&] {
        const auto* const values = values_of<scalar_t>(x);
        if (is_divisible(shape)) {
          for_each_piece(shape, channels, [&](const Piece& piece, std::size_t offset) {
            kernels::batch_norm_stats(values + piece.at, piece.shape, mean + offset, m2 + offset);
          });
          return;
        }
        if (n_parts_of(shape) == 1) return kernels::batch_norm_stats(values, shape, mean, m2);
        Parts parts(shape);
        parts.for_each([&](const Piece& piece, double* part_mean, double* part_m2) {
          kernels::batch_norm_stats(values + piece.at, piece.shape, part_mean, part_m2);
        });
        kernels::batch_norm_merge(static_cast<int>(parts.n), parts.count.data(), parts.first.data(),
                                  parts.second.data(), shape.channels, shape.channels, mean, m2);
      });
}

void backward_reduce(const Tensor& dy, const Tensor& x, BatchNormShape shape, Channels channels,
                     const double* mean, double* sum_dy, double* sum_dy_xmu) {
  if (shape.n_per_channel() == 0) return fill_zeros(channels, sum_dy, sum_dy_xmu);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, x.scalar_type(), "sync_batch_norm_backward", [&] {
        const auto* const values = values_of<scalar_t>(x);
        const auto* const gradients = values_of<scalar_t>(dy);
        if (is_divisible(shape)) {
          for_each_piece(shape, channels, [&](const Piece& piece, std::size_t offset) {
            kernels::batch_norm_backward_reduce(gradients + piece.at, values + piece.at,
                                                piece.shape, mean + offset, sum_dy + offset,
                                                sum_dy_xmu + offset);
          });
          return;
        }
        if (n_parts_of(shape) == 1) {
          return kernels::batch_norm_backward_reduce(gradients, values, shape, mean, sum_dy,
                                                     sum_dy_xmu);
        }
        Parts parts(shape);
        parts.for_each([&](const Piece& piece, double* part_dy, double* part_dy_xmu) {
          kernels::batch_norm_backward_reduce(gradients + piece.at, values + piece.at, piece.shape,
                                              mean, part_dy, part_dy_xmu);
        });
        for (std::size_t c = 0; c < shape.channels; ++c) {
          sum_dy[c] = sum_dy_xmu[c] = 0;
          for (std::size_t part = 0; part < parts.n; ++part) {
            sum_dy[c] += parts.first[part * shape.channels + c];
            sum_dy_xmu[c] += parts.second[part * shape.channels + c];
          }
        }
      });
}

void normalize(const Tensor& x, BatchNormShape shape, Channels channels, const double* mean,
               const double* invstd, const Tensor& weight, const Tensor& bias, const Tensor& y) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, x.scalar_type(), "sync_batch_norm", [&] {
        const auto* const values = values_of<scalar_t>(x);
        using Parameter = kernels::ParameterOf<scalar_t>;
        auto* const outputs = values_of<scalar_t>(y);
        const kernels::Stores stores = stores_for(y, /*n_tensors=*/2);
        for_each_piece(shape, channels, [&](const Piece& piece, std::size_t offset) {
          kernels::batch_norm_normalize(
              values + piece.at, piece.shape, mean + offset, invstd + offset,
              data_or_null<Parameter>(weight, piece.channel),
              data_or_null<Parameter>(bias, piece.channel), outputs + piece.at, stores);
        });
      });
}

void backward_elementwise(const Tensor& dy, const Tensor& x, BatchNormShape shape,
                          Channels channels, const double* mean, const double* invstd,
                          const Tensor& weight, const double* mean_dy, const double* mean_dy_xmu,
                          const Tensor& dx) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, x.scalar_type(), "sync_batch_norm_backward", [&] {
        const auto* const values = values_of<scalar_t>(x);
        const auto* const gradients = values_of<scalar_t>(dy);
        using Parameter = kernels::ParameterOf<scalar_t>;
        auto* const outputs = values_of<scalar_t>(dx);
        const kernels::Stores stores = stores_for(dx, /*n_tensors=*/3);
        for_each_piece(shape, channels, [&](const Piece& piece, std::size_t offset) {
          kernels::batch_norm_backward_elementwise(
              gradients + piece.at, values + piece.at, piece.shape, mean + offset, invstd + offset,
              data_or_null<Parameter>(weight, piece.channel), mean_dy + offset,
              mean_dy_xmu + offset, outputs + piece.at, stores);
        });
      });
}

}  // namespace lockstep::nn::cpu
