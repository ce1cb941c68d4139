#include "nn/replicas/parallel.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

#include <algorithm>

namespace lockstep::nn {

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

}  // namespace lockstep::nn
