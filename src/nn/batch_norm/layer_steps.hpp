#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <lockstep/nn/sync_batch_norm.hpp>

#include "nn/batch_norm/cpu_batch_norm.hpp"
#include "nn/layer.hpp"

/// The steps of a synchronised batch normalisation, for one module per rank and for replicas.
/// Statistics are one tensor of 1 + 2C doubles: count, mean[C], and m2[C] or later invstd[C].
/// They lie on the CPU even if the activations are on CUDA: only the steps that read activations
/// depend on the device. A transfer costs some 10 us there, so each pass has as few as it can.
///
/// If the group has low latency, a few channels at a time go through all steps, so the data of the
/// last step is still in the cache; otherwise all channels go at once, in one message.
///
/// A module's forward: begin_batch, synchronised_batch_norm (or replicated_batch_norm), which runs
/// batch_norm_forward in a node of the autograd graph, and count_batch.
namespace lockstep::nn {

using cpu::Channels;

/// std::optional or c10::optional, depending on the libtorch version. Autograd accepts this for an
/// absent tensor, but no undefined tensor.
using OptionalTensor = torch::autograd::optional_variable_list::value_type;
/// Undefined if absent.
inline at::Tensor value_of(const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); }

/// A tensor in one of the two layouts that the kernels read in place.
struct Activation {
  at::Tensor tensor;
  kernels::BatchNormShape shape;

  Channels all() const { return {0, shape.channels}; }
};

/// Inputs of a forward other than the tensors that autograd knows.
struct BatchNormSettings {
  Layer layer;
  double eps = 0;
  EpsMode eps_mode = EpsMode::plus;
  std::optional<double> momentum = {};  ///< none: the cumulative average
  double factor = 0;  ///< weight of this batch in the running statistics; of begin_batch
  at::Tensor running_mean = {}, running_var = {}, num_batches_tracked = {};  ///< undefined: absent
  OnNonfinite on_nonfinite = OnNonfinite::propagate;
};

struct MeanAndInvstd {
  at::Tensor mean, invstd;
};

/// What backward needs from its forward besides the tensors that autograd saves.
struct BatchNormRecord : torch::CustomClassHolder {
  BatchNormSettings settings;
  at::Tensor statistics;                ///< over all ranks: count, mean, invstd
  std::vector<at::Tensor> for_kernels;  ///< statistics, see for_kernels(); one per piece
  std::size_t channels_per_message = 0;
  bool nonfinite = false;  ///< what finish_statistics returned
  /// Of a rank alone, in place of all of these: its batch never leaves the device.
  MeanAndInvstd on_device;
  bool wants_input_gradient = false;
  bool has_weight = false, has_bias = false;
};

/// A piece of this rank's batch, with the parameters that it is normalised by: the whole batch, or
/// a replica's part with the replica's copies. All pieces have weights, or none; biases likewise.
struct BatchNormPiece {
  at::Tensor input;
  OptionalTensor weight, bias;  ///< of parameter_for
};
struct BatchNormGradients {
  at::Tensor input, weight, bias;  ///< undefined if not requested
};

/// Views of statistics.
inline MeanAndInvstd mean_and_invstd(const at::Tensor& statistics) {
  const std::int64_t c = (statistics.size(0) - 1) / 2;
  return {statistics.narrow(0, 1, c), statistics.narrow(0, 1 + c, c)};
}

inline at::Tensor doubles(std::int64_t size) { return at::empty({size}, at::kDouble); }
inline bool is_16_bit(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}
inline double* data(const at::Tensor& tensor) { return tensor.data_ptr<double>(); }

Activation activation_of(const at::Tensor& input);
/// Type and device of weight, bias and their gradients that the kernels take for this input.
at::TensorOptions parameter_options(const at::Tensor& input);
/// A weight or bias as the kernels take it: dense, with parameter_options(input). Absent if it is
/// undefined.
OptionalTensor parameter_for(const at::Tensor& parameter, const at::Tensor& input);
/// On CUDA `channels` must be all channels.
at::Tensor local_statistics(const Activation& x, Channels channels);
/// n x (1 + 2C) statistics, merged in the order of the tree over them.
at::Tensor merge_statistics(const at::Tensor& parts);
/// The message of forward: replaces `mine` by the statistics of all ranks, merged in the order of
/// the tree over ranks by each rank or in a reduction by the group (internal::NativeEngine), so all
/// ranks get the same bits. Why not sums: docs/design/001.
void merge_across_ranks(at::Tensor& mine, const Layer& layer);
/// How many channels each message of this layer covers: all of them or, if the group has low
/// latency, the largest `preferred` of any rank, because batches may differ in size and layout
/// between ranks. Collective, before the messages, also for ranks that want all channels.
std::size_t agree_on_channels(std::size_t preferred, std::size_t all, const Layer& layer);
/// Updates the running statistics, unless on_nonfinite keeps them, then replaces m2 by invstd.
/// Returns whether a mean or variance of the batch is not finite in the type of the running
/// statistics; the same on all ranks. Throws UsageError, before any change, if there is only one
/// value per channel.
bool finish_statistics(const at::Tensor& statistics, const BatchNormSettings& settings,
                       at::IntArrayRef input_sizes);
/// `values` (doubles) as the kernels take them: on CUDA a copy on x's device, in the type in which
/// ATen computes; on the CPU unchanged.
at::Tensor for_kernels(const Activation& x, const at::Tensor& values);
/// `statistics`: returned by for_kernels, of these channels. `output` has the layout of x. It may
/// have a grad_fn: it is written without autograd.
void normalize(const Activation& x, Channels channels, const at::Tensor& statistics,
               const at::Tensor& weight, const at::Tensor& bias, at::Tensor& output);

/// Calls f(some channels) until all are done.
template <class F>
void for_each_message(std::size_t channels, std::size_t per_message, const F& f) {
  for (std::size_t c = 0; c < channels; c += per_message) {
    f(Channels{c, std::min(per_message, channels - c)});
  }
}
/// Copies `part` of two per-channel arrays to its place among all channels.
inline void copy_channels(const double* part, Channels channels, std::size_t all, double* to) {
  std::copy_n(part, channels.count, to + channels.first);
  std::copy_n(part + channels.count, channels.count, to + all + channels.first);
}

/// Throws UsageError if input or state is invalid. Undefined state is absent.
void check_batch_norm(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                      const BatchNormSettings& settings);
/// check_batch_norm; then sets the weight of this batch in the running statistics. If it throws,
/// the call is refused.
void begin_batch(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                 BatchNormSettings& settings);
/// After a forward: adds 1 to num_batches_tracked, unless on_nonfinite keeps it.
void count_batch(const BatchNormRecord& record);
/// The complete forward of one module per rank. `record` must have its settings; fills the rest.
at::Tensor batch_norm_forward(const at::Tensor& input, const at::Tensor& weight,
                              const at::Tensor& bias, BatchNormRecord& record);
/// What backward gets of a piece.
struct BatchNormBackwardPiece {
  at::Tensor grad_output, input, weight;
  bool wants_input;  ///< a gradient of it; the same for all pieces
  bool wants_weight, wants_bias;
};
/// The backward of all pieces. Collective if the inputs' gradients are requested; then `means`, if
/// defined, gets the means of dy and of dy (x - mean) over all ranks, 2C doubles.
std::vector<BatchNormGradients> batch_norm_backward(std::span<const BatchNormBackwardPiece> pieces,
                                                    const BatchNormRecord& record,
                                                    const at::Tensor& means = {});
/// What the backward of a backward gets of a piece: its grad_output, input and weight, and the
/// gradients of its results.
struct BatchNormSecondPiece {
  std::array<at::Tensor, 3> inputs;  ///< the last undefined if there is no weight
  std::array<bool, 3> wanted;        ///< whose gradients
  BatchNormGradients gradients;      ///< undefined where the backward gave no result
};
/// The backward of batch_norm_backward. `means`: what that gave. Collective if that was.
/// Returns the gradients of the pieces' inputs; undefined if not wanted.
std::vector<std::array<at::Tensor, 3>> batch_norm_second_backward(
    std::span<const BatchNormSecondPiece> pieces, const BatchNormRecord& record,
    const at::Tensor& means);
/// One autograd node over the pieces, whose forward is compute() and whose backward is
/// batch_norm_backward. compute() returns their outputs and fills `record`.
std::vector<at::Tensor> batch_norm_node(std::span<const BatchNormPiece> pieces,
                                        const c10::intrusive_ptr<BatchNormRecord>& record,
                                        c10::function_ref<std::vector<at::Tensor>()> compute);
/// The autograd node of a module that has its rank's whole batch. Fills `record`. Check first.
at::Tensor synchronised_batch_norm(const at::Tensor& input, const at::Tensor& weight,
                                   const at::Tensor& bias,
                                   const c10::intrusive_ptr<BatchNormRecord>& record);

}  // namespace lockstep::nn
