#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>

#include <algorithm>
#include <array>
#include <lockstep/error.hpp>
#include <lockstep/trace.hpp>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "nn/batch_norm/layer_steps.hpp"
#include "nn/error.hpp"

/// The autograd nodes. The backward of a batch normalisation is a node of its own where autograd
/// asks for a graph of it (create_graph), so that gradients have gradients.
namespace lockstep::nn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const BatchNormRecord& record_in(const c10::intrusive_ptr<torch::CustomClassHolder>& capsule) {
  return static_cast<const BatchNormRecord&>(*capsule);
}

/// The tensors of all pieces, one kind after the other: the gradients of the outputs, the inputs,
/// then the weights, if there are any. Gives the gradients of the inputs, if they are wanted, then
/// those of weights and biases, if there are any.
class BatchNormBackward : public torch::autograd::Function<BatchNormBackward> {
 public:
  static constexpr std::size_t kOtherArguments = 2;  ///< of forward: none of them a tensor

  static variable_list forward(AutogradContext* context, at::TensorList tensors,
                               std::size_t n_pieces,
                               const c10::intrusive_ptr<torch::CustomClassHolder>& capsule) {
    const BatchNormRecord& record = record_in(capsule);
    const Tensor means =
        record.wants_input_gradient ? doubles(record.statistics.size(0) - 1) : Tensor();
    std::vector<BatchNormBackwardPiece> pieces;
    for (std::size_t i = 0; i < n_pieces; ++i) {
      pieces.push_back({tensors[i], tensors[n_pieces + i],
                        record.has_weight ? tensors[2 * n_pieces + i] : Tensor(),
                        record.wants_input_gradient, record.has_weight, record.has_bias});
    }
    const auto results = batch_norm_backward(pieces, record, means);
    variable_list saved = tensors.vec();
    if (means.defined()) saved.push_back(means);
    context->save_for_backward(std::move(saved));
    context->saved_data["record"] = c10::IValue::make_capsule(capsule);
    variable_list all;
    for (const auto part :
         {&BatchNormGradients::input, &BatchNormGradients::weight, &BatchNormGradients::bias}) {
      for (const BatchNormGradients& result : results) {
        if ((result.*part).defined()) all.push_back(result.*part);
      }
    }
    return all;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto hold = context->saved_data["record"].toCapsule();
    const BatchNormRecord& record = record_in(hold);
    const variable_list saved = context->get_saved_variables();
    const std::size_t n_kinds = record.has_weight ? 3 : 2, n = saved.size() / n_kinds;
    std::vector<BatchNormSecondPiece> pieces(n);
    std::size_t next = 0;
    const auto take = [&](bool is_there, Tensor BatchNormGradients::*part) {
      for (std::size_t i = 0; is_there && i < n; ++i) {
        pieces[i].gradients.*part = gradients[next++];
      }
    };
    take(record.wants_input_gradient, &BatchNormGradients::input);
    take(record.has_weight, &BatchNormGradients::weight);
    take(record.has_bias, &BatchNormGradients::bias);
    for (std::size_t kind = 0; kind < n_kinds; ++kind) {
      for (std::size_t i = 0; i < n; ++i) {
        pieces[i].inputs[kind] = saved[kind * n + i];
        pieces[i].wanted[kind] = context->needs_input_grad(kind * n + i);
      }
    }
    const auto results = detail::translate_errors_for_torch([&] {
      return batch_norm_second_backward(pieces, record,
                                        record.wants_input_gradient ? saved.back() : Tensor());
    });
    variable_list all(n_kinds * n + kOtherArguments);
    for (std::size_t kind = 0; kind < n_kinds; ++kind) {
      for (std::size_t i = 0; i < n; ++i) all[kind * n + i] = results[i][kind];
    }
    return all;
  }
};

/// The inputs of all pieces, then their weights, then their biases, if they have them.
class BatchNormFunction : public torch::autograd::Function<BatchNormFunction> {
 public:
  static constexpr std::size_t kOtherArguments = 3;  ///< of forward: none of them a tensor

  static variable_list forward(AutogradContext* context, at::TensorList tensors,
                               std::size_t n_pieces,
                               const c10::intrusive_ptr<BatchNormRecord>& record,
                               c10::function_ref<variable_list()> compute) {
    variable_list outputs = compute();
    context->save_for_backward(
        tensors.slice(0, record->has_weight ? 2 * n_pieces : n_pieces).vec());
    context->saved_data["record"] = c10::IValue::make_capsule(record);
    // Whether to communicate must not depend on which gradients this rank requests, but only on the
    // graph, which is the same on all ranks.
    record->wants_input_gradient =
        std::ranges::any_of(tensors.slice(0, n_pieces), &Tensor::requires_grad);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto hold = context->saved_data["record"].toCapsule();
    const BatchNormRecord& record = record_in(hold);
    const variable_list saved = context->get_saved_variables();
    return detail::translate_errors_for_torch([&] {
      return at::GradMode::is_enabled() ? with_graph(gradients, saved, hold)
                                        : without_graph(*context, gradients, saved, record);
    });
  }

 private:
  static std::size_t n_arguments(const BatchNormRecord& record, std::size_t n_pieces) {
    return (1 + std::size_t{record.has_weight} + std::size_t{record.has_bias}) * n_pieces +
           kOtherArguments;
  }
  /// Both return the gradients of forward's arguments.
  static variable_list with_graph(const variable_list& gradients, const variable_list& saved,
                                  const c10::intrusive_ptr<torch::CustomClassHolder>& capsule) {
    const BatchNormRecord& record = record_in(capsule);
    const std::size_t n = gradients.size();
    variable_list tensors = gradients;
    tensors.insert(tensors.end(), saved.begin(), saved.end());
    variable_list all = BatchNormBackward::apply(at::TensorList(tensors), n, capsule);
    if (!record.wants_input_gradient) all.insert(all.begin(), n, Tensor());
    all.resize(n_arguments(record, n));
    return all;
  }
  static variable_list without_graph(const AutogradContext& context, const variable_list& gradients,
                                     const variable_list& saved, const BatchNormRecord& record) {
    const std::size_t n = gradients.size(), first_bias = record.has_weight ? 2 * n : n;
    std::vector<BatchNormBackwardPiece> pieces;
    for (std::size_t i = 0; i < n; ++i) {
      pieces.push_back({gradients[i], saved[i], record.has_weight ? saved[n + i] : Tensor(),
                        record.wants_input_gradient,
                        record.has_weight && context.needs_input_grad(n + i),
                        record.has_bias && context.needs_input_grad(first_bias + i)});
    }
    const auto results = batch_norm_backward(pieces, record);
    variable_list all(n_arguments(record, n));
    for (std::size_t i = 0; i < n; ++i) {
      all[i] = results[i].input;
      if (record.has_weight) all[n + i] = results[i].weight;
      if (record.has_bias) all[first_bias + i] = results[i].bias;
    }
    return all;
  }
};

}  // namespace

std::vector<Tensor> batch_norm_node(std::span<const BatchNormPiece> pieces,
                                    const c10::intrusive_ptr<BatchNormRecord>& record,
                                    c10::function_ref<variable_list()> compute) {
  record->has_weight = pieces.front().weight.has_value();
  record->has_bias = pieces.front().bias.has_value();
  for (const BatchNormPiece& piece : pieces) {
    if (piece.weight.has_value() == record->has_weight &&
        piece.bias.has_value() == record->has_bias) {
      continue;
    }
    throw UsageError(record->settings.layer.context(kForward),
                     "all replicas must have a weight, or none, and likewise a bias");
  }
  variable_list tensors;
  tensors.reserve(3 * pieces.size());
  for (const BatchNormPiece& piece : pieces) tensors.push_back(piece.input);
  for (const BatchNormPiece& piece : pieces) {
    if (record->has_weight) tensors.push_back(*piece.weight);
  }
  for (const BatchNormPiece& piece : pieces) {
    if (record->has_bias) tensors.push_back(*piece.bias);
  }
  return BatchNormFunction::apply(at::TensorList(tensors), pieces.size(), record, compute);
}

namespace {

/// The forward of a rank that is alone in its group and has its batch on a CUDA device: BatchNorm
/// by libtorch's own operator, which autograd knows. Nothing is copied to the host, and nothing
/// waits for the device. Absent where that operator does less than the layer promises.
std::optional<Tensor> batch_norm_alone(const BatchNormPiece& whole, BatchNormRecord& record) {
  const BatchNormSettings& settings = record.settings;
  const Tensor &input = whole.input, &mean = settings.running_mean, &var = settings.running_var;
  const auto is_for_kernels = [&](const Tensor& running) {
    return !running.defined() ||
           (running.dtype() == parameter_options(input).dtype() && running.is_contiguous());
  };
  const bool is_batch_norm =
      settings.eps_mode == EpsMode::plus && settings.on_nonfinite == OnNonfinite::propagate;
  // One value per channel is an error, none leaves the running statistics; cuDNN takes 5
  // dimensions.
  const bool has_batch = input.numel() > 0 && input.numel() >= 2 * settings.layer.n_channels;
  if (!input.is_cuda() || settings.layer.group.size() > 1 || !is_batch_norm || !has_batch ||
      input.dim() > 5 || mean.defined() != var.defined() || !is_for_kernels(mean) ||
      !is_for_kernels(var)) {
    return {};
  }
  const TraceScope scope("SyncBatchNorm forward");
  auto [output, batch_mean, invstd, reserve, implementation] = at::native::_batch_norm_impl_index(
      input, whole.weight, whole.bias, mean, var, /*training=*/true, settings.factor, settings.eps,
      at::globalContext().userEnabledCuDNN());
  record.on_device = {std::move(batch_mean), std::move(invstd)};
  return std::move(output);
}

}  // namespace

Tensor synchronised_batch_norm(const Tensor& input, const Tensor& weight, const Tensor& bias,
                               const c10::intrusive_ptr<BatchNormRecord>& record) {
  const BatchNormPiece whole{input, parameter_for(weight, input), parameter_for(bias, input)};
  if (auto output = batch_norm_alone(whole, *record)) return *std::move(output);
  return batch_norm_node({&whole, 1}, record,
                         [&]() -> variable_list {
                           return {batch_norm_forward(input, value_of(whole.weight),
                                                      value_of(whole.bias), *record)};
                         })
      .front();
}

}  // namespace lockstep::nn
