#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>

#include <lockstep/group.hpp>
#include <lockstep/nn/sync_batch_norm.hpp>

#include "kernels/batch_norm.hpp"

/// The steps of a synchronised batch normalisation, for one module per rank and for replicas.
/// Statistics are one tensor of 1 + 2C doubles: count, mean[C], and m2[C] or later invstd[C].
namespace lockstep::nn {

/// std::optional or c10::optional, as libtorch's version has it. Autograd takes an absent tensor
/// so, but no undefined one.
using OptionalTensor = torch::autograd::optional_variable_list::value_type;

/// A tensor in one of the two layouts that the kernels read in place.
struct Activation {
  at::Tensor tensor;
  kernels::BatchNormShape shape;
};

/// What a forward needs besides the tensors that autograd knows.
struct BatchNormSettings {
  Group group;
  double eps = 0;
  EpsMode eps_mode = EpsMode::plus;
  double factor = 0;  ///< weight of this batch in the running statistics
  at::Tensor running_mean, running_var;
};

inline at::Tensor doubles(std::int64_t size) { return at::empty({size}, at::kDouble); }
inline double* data(const at::Tensor& tensor) { return tensor.data_ptr<double>(); }
template <class T>
const T* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr<T>() : nullptr;
}

Activation activation_of(const at::Tensor& input);
at::Tensor local_statistics(const Activation& x);
/// n x (1 + 2C) statistics, merged in order.
at::Tensor merge_statistics(const at::Tensor& parts);
/// The one message of forward: each rank merges all in rank order, so that all hold the same bits.
/// Why not sums: docs/design/001.
at::Tensor merge_over(const at::Tensor& mine, const Group& group);
/// Updates the running statistics, then m2 becomes invstd.
/// Throws UsageError where there is one value per channel; nothing has changed then.
void finish_statistics(const at::Tensor& statistics, const BatchNormSettings& settings,
                       at::IntArrayRef input_sizes);
void normalize(const Activation& x, const at::Tensor& statistics, const at::Tensor& weight,
               const at::Tensor& bias, const at::Tensor& output);
/// The one message of backward: sum_dy[C], sum_dy_xmu[C] become means over all ranks.
void average_gradient(const at::Tensor& message, const at::Tensor& invstd, double count,
                      const BatchNormSettings& settings);
/// Throws UsageError in a backward with create_graph.
void refuse_create_graph(const Group& group);

}  // namespace lockstep::nn
