#include <lockstep/nn/sync_batch_norm_scope.hpp>

#include <ATen/NativeFunctions.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <lockstep/error.hpp>
#include <lockstep/launch.hpp>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "nn/batch_norm/layer_steps.hpp"
#include "nn/error.hpp"

/// The kernels are registered at the autograd keys, which see every call on plain tensors, and at
/// the CPU and CUDA keys for inference mode, which skips the former. Without a scope they call the
/// operators' composite implementations, as libtorch would.
///
/// TorchScript's profiling executor differentiates batch_norm itself and calls
/// _batch_norm_impl_index and its backward instead. The id of such a forward's record is stored in
/// the operator's reserve tensor.
namespace lockstep::nn {
namespace {

using at::Tensor;
using IndexResult = std::tuple<Tensor, Tensor, Tensor, Tensor, std::int64_t>;

thread_local SyncBatchNormScope* innermost = nullptr;

/// Records of forwards, by the id in the tensor kept for backward. That tensor owns the record; a
/// copy of it (a clone, a hook that offloads saved tensors) has only the id, so a record that is
/// gone is never read.
class Records {
 public:
  Tensor keep(c10::intrusive_ptr<BatchNormRecord> record) {
    auto kept = std::make_unique<Kept>();
    {
      const std::lock_guard lock(mutex_);
      kept->content.number = ++n_kept_;
      records_.emplace(kept->content.number, c10::weak_intrusive_ptr<BatchNormRecord>(record));
    }
    kept->record = std::move(record);
    Kept* const it = kept.release();
    return at::from_blob(
        &it->content, {sizeof(Content)},
        [this, it](void*) {
          const std::unique_ptr<Kept> last(it);
          const std::lock_guard lock(mutex_);
          records_.erase(it->content.number);
        },
        at::TensorOptions(at::kByte));
  }

  /// Null if the tensor is not a reserve tensor, or the forward's own one is gone.
  c10::intrusive_ptr<BatchNormRecord> find(const Tensor& kept) {
    if (!kept.defined() || kept.scalar_type() != at::kByte || kept.numel() != sizeof(Content))
      return {};
    const Tensor bytes = kept.cpu().contiguous();
    Content content;
    std::memcpy(&content, bytes.data_ptr(), sizeof content);
    const std::lock_guard lock(mutex_);
    const auto found = records_.find(content.number);
    if (content.magic != kMagic || found == records_.end()) return {};
    return found->second.lock();
  }

 private:
  static constexpr std::uint64_t kMagic = 0x6c6f636b73746570;
  struct Content {
    std::uint64_t magic = kMagic;
    std::uint64_t number = 0;
  };
  struct Kept {
    Content content;
    c10::intrusive_ptr<BatchNormRecord> record;
  };

  std::mutex mutex_;
  std::uint64_t n_kept_ = 0;
  std::unordered_map<std::uint64_t, c10::weak_intrusive_ptr<BatchNormRecord>> records_;
};

Records& records() {
  static auto* const all = new Records;  // tensors may outlive every global
  return *all;
}

constexpr std::int64_t kSyncImplementation = 0x6c6f636b;  // libtorch's own are 0, 1, 2

Tensor value_of(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

c10::intrusive_ptr<BatchNormRecord> make_record(const Tensor& input, const Tensor& weight,
                                                const Tensor& bias, const Tensor& running_mean,
                                                const Tensor& running_var, double momentum,
                                                double eps) {
  auto record = c10::make_intrusive<BatchNormRecord>();
  record->settings = {detail::next_layer(*innermost, input.dim() < 2 ? 0 : input.size(1)),
                      eps,
                      EpsMode::plus,
                      momentum,
                      running_mean,
                      running_var};
  if (input.dim() < 2) {
    throw UsageError(record->settings.layer.context(kForward),
                     fmt::format("expected input of 2 or more dimensions, got {}D", input.dim()));
  }
  check_batch_norm(input, input.size(1), weight, bias, record->settings);
  return record;
}

Tensor batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                  const OptionalTensor& running_mean, const OptionalTensor& running_var,
                  bool training, double momentum, double eps, bool cudnn_enabled) {
  if (innermost == nullptr || !training) {
    return at::native::batch_norm(input, weight, bias, running_mean, running_var, training,
                                  momentum, eps, cudnn_enabled);
  }
  const Tensor w = value_of(weight);
  const Tensor b = value_of(bias);
  return detail::called_by_torch([&] {
    return synchronised_batch_norm(
        input, w, b,
        make_record(input, w, b, value_of(running_mean), value_of(running_var), momentum, eps));
  });
}

IndexResult batch_norm_impl_index(const Tensor& input, const OptionalTensor& weight,
                                  const OptionalTensor& bias, const OptionalTensor& running_mean,
                                  const OptionalTensor& running_var, bool training, double momentum,
                                  double eps, bool cudnn_enabled) {
  if (innermost == nullptr || !training) {
    return at::native::_batch_norm_impl_index(input, weight, bias, running_mean, running_var,
                                              training, momentum, eps, cudnn_enabled);
  }
  const at::NoGradGuard no_grad;  // the caller of this operator differentiates it
  const Tensor w = value_of(weight);
  const Tensor b = value_of(bias);
  return detail::called_by_torch([&]() -> IndexResult {
    const auto record =
        make_record(input, w, b, value_of(running_mean), value_of(running_var), momentum, eps);
    Tensor output = batch_norm_forward(input, value_of(parameter_for(w, input)),
                                       value_of(parameter_for(b, input)), *record);
    const auto [mean, invstd] = mean_and_invstd(record->statistics);
    return {output, mean, invstd, records().keep(record), kSyncImplementation};
  });
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
  const auto result = detail::called_by_torch([&] {
    const auto record = records().find(reserve);
    if (!record) {
      throw UsageError(
          {.operation = "backward of a batch_norm in a SyncBatchNormScope"},
          "what its forward kept for backward is gone and this is at most a clone of it: "
          "hooks that replace the tensors autograd saves (offloading, compression) must "
          "leave those of batch_norm as they are");
    }
    return batch_norm_backward(gradient, input, value_of(parameter_for(value_of(weight), input)),
                               *record, {wanted[0], wanted[1], wanted[2]});
  });
  return {result.input, result.weight, result.bias};
}

/// libtorch implements it by a batch_norm with another meaning.
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

SyncBatchNormScope::SyncBatchNormScope(Settings settings)
    : settings_(std::move(settings)), outer_(std::exchange(innermost, this)) {}
SyncBatchNormScope::SyncBatchNormScope(std::optional<Group> group, std::source_location where)
    : SyncBatchNormScope(Settings{std::move(group), where}) {}
SyncBatchNormScope::~SyncBatchNormScope() { innermost = outer_; }

std::optional<SyncBatchNormScope::Settings> SyncBatchNormScope::active() {
  if (innermost == nullptr) return std::nullopt;
  return innermost->settings_;
}

Layer detail::next_layer(SyncBatchNormScope& scope, std::int64_t n_channels) {
  const auto& [group, where] = scope.settings_;
  return {.group = group ? *group : default_group(),
          .title = nullptr,
          .where = where,
          .number = ++scope.n_layers_,
          .n_channels = n_channels};
}

SuspendedScope::SuspendedScope() : scope_(std::exchange(innermost, nullptr)) {}
SuspendedScope::~SuspendedScope() { innermost = scope_; }

}  // namespace lockstep::nn
