#include <lockstep/nn/sync_batch_norm_scope.hpp>

#include <ATen/NativeFunctions.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <lockstep/error.hpp>
#include <lockstep/world.hpp>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "nn/batch_norm/inner_scopes.hpp"
#include "nn/batch_norm/layer_steps.hpp"
#include "nn/batch_norm/scoped_layers.hpp"
#include "nn/error.hpp"
#include "world/session.hpp"

/// The kernels are registered at the autograd keys, which see every call on plain tensors, and at
/// the CPU and CUDA keys for inference mode, which skips the former. Without a scope they call the
/// operators' composite implementations, as libtorch would.
///
/// TorchScript's profiling executor differentiates batch_norm itself and calls
/// _batch_norm_impl_index and its backward instead. The id of such a forward's record is stored in
/// the operator's reserve tensor.
namespace lockstep::nn {

/// A scope, or a suspension of the enclosing scopes, in its thread's list. Any thread may end it,
/// in any order (Python generators do). Only its own thread removes it, when it next reads the
/// list.
struct detail::ScopeEntry {
  std::optional<SyncBatchNormScope::Settings> settings;  // none: no scope applies
  std::int64_t n_layers = 0;
  bool is_in_replica = false;
  std::atomic<bool> has_ended{false};
  std::shared_ptr<ScopeEntry> in_list{};  // keeps it alive while it is in the list
  ScopeEntry* outer = nullptr;
};

namespace {

using at::Tensor;
using detail::ScopeEntry;
using IndexResult = std::tuple<Tensor, Tensor, Tensor, Tensor, std::int64_t>;

// A raw pointer: a scope may outlive its thread's thread_local objects.
constinit thread_local ScopeEntry* innermost = nullptr;

void drop_ended() noexcept {
  for (ScopeEntry** place = &innermost; *place != nullptr;) {
    ScopeEntry* const entry = *place;
    if (!entry->has_ended) {
      place = &entry->outer;
      continue;
    }
    *place = entry->outer;
    entry->in_list.reset();  // may free the entry
  }
}

std::shared_ptr<ScopeEntry> enter_scope(std::optional<SyncBatchNormScope::Settings> settings) {
  auto entry = std::make_shared<ScopeEntry>();
  entry->settings = std::move(settings);
  entry->outer = innermost;
  entry->is_in_replica = innermost != nullptr && innermost->is_in_replica;
  entry->in_list = entry;
  innermost = entry.get();
  return entry;
}

void end_scope(ScopeEntry& entry) noexcept {
  entry.has_ended = true;
  drop_ended();
}

/// The scope that applies on this thread, or null.
ScopeEntry* active_scope() {
  if (innermost != nullptr && innermost->has_ended) drop_ended();
  return innermost != nullptr && innermost->settings ? innermost : nullptr;
}

Layer next_layer(ScopeEntry& scope, std::int64_t n_channels) {
  const auto& [group, where] = *scope.settings;
  if (scope.is_in_replica) {
    throw UsageError(
        {.operation = fmt::format("{} of a batch_norm in a SyncBatchNormScope", kForward),
         .where = where},
        "a replica of DataParallel has only its part of the batch, and a scope does not "
        "synchronise replicas: pass DataParallel the result of convert_sync_batchnorm");
  }
  Layer layer{.group = group ? *group : default_group(),
              .title = nullptr,
              .where = where,
              .number = ++scope.n_layers,
              .n_channels = n_channels};
  if (internal::has_left(layer.group)) {
    layer.group = internal::follow_world(layer.group, layer.context(kForward));
  }
  return layer;
}

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

c10::intrusive_ptr<BatchNormRecord> make_record(ScopeEntry& scope, const Tensor& input,
                                                const Tensor& weight, const Tensor& bias,
                                                const Tensor& running_mean,
                                                const Tensor& running_var, double momentum,
                                                double eps) {
  auto record = c10::make_intrusive<BatchNormRecord>();
  record->settings = {.layer = next_layer(scope, input.dim() < 2 ? 0 : input.size(1)),
                      .eps = eps,
                      .momentum = momentum,
                      .running_mean = running_mean,
                      .running_var = running_var};
  begin_batch(input, weight, bias, record->settings);
  ScopedLayers::all().add(weight, running_mean);
  return record;
}

/// The scope for a batch_norm, or null.
ScopeEntry* scope_for(bool training, const OptionalTensor& weight,
                      const OptionalTensor& running_mean) {
  if (!training) return nullptr;
  ScopeEntry* const scope = active_scope();
  if (scope == nullptr) {
    detail::translate_errors_for_torch(
        [&] { ScopedLayers::all().remove(value_of(weight), value_of(running_mean)); });
  }
  return scope;
}

Tensor batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                  const OptionalTensor& running_mean, const OptionalTensor& running_var,
                  bool training, double momentum, double eps, bool cudnn_enabled) {
  ScopeEntry* const scope = scope_for(training, weight, running_mean);
  if (scope == nullptr) {
    return at::native::batch_norm(input, weight, bias, running_mean, running_var, training,
                                  momentum, eps, cudnn_enabled);
  }
  const Tensor w = value_of(weight);
  const Tensor b = value_of(bias);
  return detail::translate_errors_for_torch([&] {
    return synchronised_batch_norm(input, w, b,
                                   make_record(*scope, input, w, b, value_of(running_mean),
                                               value_of(running_var), momentum, eps));
  });
}

IndexResult batch_norm_impl_index(const Tensor& input, const OptionalTensor& weight,
                                  const OptionalTensor& bias, const OptionalTensor& running_mean,
                                  const OptionalTensor& running_var, bool training, double momentum,
                                  double eps, bool cudnn_enabled) {
  ScopeEntry* const scope = scope_for(training, weight, running_mean);
  if (scope == nullptr) {
    return at::native::_batch_norm_impl_index(input, weight, bias, running_mean, running_var,
                                              training, momentum, eps, cudnn_enabled);
  }
  const at::NoGradGuard no_grad;  // the caller of this operator differentiates it
  const Tensor w = value_of(weight);
  const Tensor b = value_of(bias);
  return detail::translate_errors_for_torch([&]() -> IndexResult {
    const auto record = make_record(*scope, input, w, b, value_of(running_mean),
                                    value_of(running_var), momentum, eps);
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
  // The grad mode says whether to create a graph.
  const auto result = detail::translate_errors_for_torch([&] {
    const auto record = records().find(reserve);
    if (!record) {
      throw UsageError({.operation = "backward of a batch_norm in a SyncBatchNormScope"},
                       "the tensor that its forward saved for backward was freed, and this may be "
                       "a clone of it: hooks on saved tensors (offloading, compression) must not "
                       "replace those of batch_norm");
    }
    const BatchNormBackwardPiece whole{
        gradient,  input,     value_of(parameter_for(value_of(weight), input)),
        wanted[0], wanted[1], wanted[2]};
    return batch_norm_backward({&whole, 1}, *record).front();
  });
  return {result.input, result.weight, result.bias};
}

/// Not synchronised: libtorch implements it as a batch_norm of the reshaped input.
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
    : entry_(enter_scope(Settings{std::move(settings.group), is_user_code(settings.where)
                                                                 ? settings.where
                                                                 : std::source_location()})) {}
SyncBatchNormScope::SyncBatchNormScope(std::optional<Group> group, std::source_location where)
    : SyncBatchNormScope(Settings{std::move(group), where}) {}
SyncBatchNormScope::~SyncBatchNormScope() { end_scope(*entry_); }

std::optional<SyncBatchNormScope::Settings> SyncBatchNormScope::active() {
  const ScopeEntry* const scope = active_scope();
  return scope == nullptr ? std::nullopt : scope->settings;
}

ReplicaScope::ReplicaScope(std::optional<SyncBatchNormScope::Settings> callers)
    : entry_(enter_scope(std::move(callers))) {
  entry_->is_in_replica = true;
}
ReplicaScope::~ReplicaScope() { end_scope(*entry_); }

SuspendedScope::SuspendedScope() : entry_(active_scope() ? enter_scope(std::nullopt) : nullptr) {}
SuspendedScope::~SuspendedScope() {
  if (entry_) end_scope(*entry_);
}

}  // namespace lockstep::nn
