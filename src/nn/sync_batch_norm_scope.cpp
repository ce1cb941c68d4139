#include <lockstep/nn/sync_batch_norm_scope.hpp>

#include <ATen/NativeFunctions.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <array>
#include <lockstep/error.hpp>
#include <memory>
#include <tuple>
#include <utility>

#include "nn/batch_norm.hpp"
#include "nn/error.hpp"

/// The kernels stand at the autograd keys, where they see every call on plain tensors, and at the
/// CPU and CUDA keys for inference mode, in which the former are left out. Without a scope they
/// call what would have been called: the operators' composite implementations.
///
/// TorchScript's profiling executor differentiates batch_norm itself and calls
/// _batch_norm_impl_index and its backward instead. The record of such a forward travels in the
/// tensor that the operator has for what a backend reserves.
namespace lockstep::nn {
namespace {

using at::Tensor;
using IndexResult = std::tuple<Tensor, Tensor, Tensor, Tensor, std::int64_t>;

thread_local const Group* scope_group = nullptr;

constexpr std::int64_t kSyncImplementation = 0x6c6f636b;  // libtorch's own are 0, 1, 2

Tensor value_of(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

c10::intrusive_ptr<BatchNormRecord> make_record(const Tensor& input, const Tensor& weight,
                                                const Tensor& bias, const Tensor& running_mean,
                                                const Tensor& running_var, double momentum,
                                                double eps) {
  const ErrorContext context =
      context_of("SyncBatchNormScope", *scope_group, std::source_location::current());
  if (input.dim() < 2) {
    throw UsageError(context,
                     fmt::format("expected input of 2 or more dimensions, got {}D", input.dim()));
  }
  auto record = c10::make_intrusive<BatchNormRecord>();
  record->settings = {*scope_group, eps, EpsMode::plus, momentum, running_mean, running_var};
  check_batch_norm(input, input.size(1), weight, bias, record->settings, context);
  return record;
}

Tensor batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                  const OptionalTensor& running_mean, const OptionalTensor& running_var,
                  bool training, double momentum, double eps, bool cudnn_enabled) {
  if (scope_group == nullptr || !training) {
    return at::native::batch_norm(input, weight, bias, running_mean, running_var, training,
                                  momentum, eps, cudnn_enabled);
  }
  const Tensor w = value_of(weight);
  const Tensor b = value_of(bias);
  return synchronised_batch_norm(
      input, w, b,
      make_record(input, w, b, value_of(running_mean), value_of(running_var), momentum, eps));
}

IndexResult batch_norm_impl_index(const Tensor& input, const OptionalTensor& weight,
                                  const OptionalTensor& bias, const OptionalTensor& running_mean,
                                  const OptionalTensor& running_var, bool training, double momentum,
                                  double eps, bool cudnn_enabled) {
  if (scope_group == nullptr || !training) {
    return at::native::_batch_norm_impl_index(input, weight, bias, running_mean, running_var,
                                              training, momentum, eps, cudnn_enabled);
  }
  const at::NoGradGuard no_grad;  // whoever calls this one differentiates it himself
  const Tensor w = value_of(weight);
  const Tensor b = value_of(bias);
  const auto record =
      make_record(input, w, b, value_of(running_mean), value_of(running_var), momentum, eps);
  Tensor output = batch_norm_forward(input, value_of(parameter_for(w, input)),
                                     value_of(parameter_for(b, input)), *record);
  const std::int64_t c = (record->statistics.size(0) - 1) / 2;
  const Tensor reserve = at::from_blob(
      record.get(), {1}, [record](void*) {}, at::TensorOptions(at::kByte));
  return {output, record->statistics.narrow(0, 1, c), record->statistics.narrow(0, 1 + c, c),
          reserve, kSyncImplementation};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_impl_index_backward(
    std::int64_t implementation, const Tensor& input, const Tensor& gradient,
    const OptionalTensor& weight, const OptionalTensor& running_mean,
    const OptionalTensor& running_var, const OptionalTensor& saved_mean,
    const OptionalTensor& saved_invstd, bool training, double eps, std::array<bool, 3> wanted,
    const Tensor& reserve) {
  if (implementation != kSyncImplementation) {
    return at::native::_batch_norm_impl_index_backward(
        implementation, input, gradient, weight, running_mean, running_var, saved_mean,
        saved_invstd, training, eps, wanted, reserve);
  }
  const at::NoGradGuard no_grad;
  const auto& record = *static_cast<const BatchNormRecord*>(reserve.data_ptr());
  const auto result =
      batch_norm_backward(gradient, input, value_of(parameter_for(value_of(weight), input)), record,
                          {wanted[0], wanted[1], wanted[2]});
  return {result.input, result.weight, result.bias};
}

/// libtorch makes it of a batch_norm of another meaning.
Tensor instance_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                     const OptionalTensor& running_mean, const OptionalTensor& running_var,
                     bool use_input_stats, double momentum, double eps, bool cudnn_enabled) {
  const SuspendedScope suspended;
  return at::native::instance_norm(input, weight, bias, running_mean, running_var, use_input_stats,
                                   momentum, eps, cudnn_enabled);
}

void add_kernels(torch::Library& library) {
  library.impl("batch_norm", batch_norm);
  library.impl("_batch_norm_impl_index", batch_norm_impl_index);
  library.impl("_batch_norm_impl_index_backward", batch_norm_impl_index_backward);
  library.impl("instance_norm", instance_norm);
}

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { add_kernels(library); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { add_kernels(library); }
TORCH_LIBRARY_IMPL(aten, CPU, library) { add_kernels(library); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) { add_kernels(library); }

}  // namespace

SyncBatchNormScope::SyncBatchNormScope(Group group)
    : group_(std::move(group)), outer_(std::exchange(scope_group, &group_)) {}
SyncBatchNormScope::~SyncBatchNormScope() { scope_group = outer_; }

SuspendedScope::SuspendedScope() : group_(std::exchange(scope_group, nullptr)) {}
SuspendedScope::~SuspendedScope() { scope_group = group_; }

}  // namespace lockstep::nn
