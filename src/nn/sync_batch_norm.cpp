#include <lockstep/nn/sync_batch_norm.hpp>

#include <fmt/format.h>
#include <torch/nn/functional/batchnorm.h>

#include <lockstep/error.hpp>

#include "nn/batch_norm.hpp"
#include "nn/error.hpp"
#include "nn/replicated_batch_norm.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
struct State {
  Tensor weight, bias, num_batches_tracked;
};

/// `nonfinite`: whether the batch holds a NaN or an infinity.
Tensor train(const Tensor& input, const State& state, BatchNormSettings settings,
             const SyncBatchNormOptions& options, const detail::ReplicaLink* replica,
             const ErrorContext& context, bool& nonfinite) {
  check_batch_norm(input, options.num_features(), state.weight, state.bias, settings, context);
  const bool counts = state.num_batches_tracked.defined();
  if (options.momentum().has_value()) {
    settings.factor = *options.momentum();
  } else if (counts) {
    settings.factor = 1 / (state.num_batches_tracked.item<double>() + 1);
  }
  Tensor output, statistics;
  if (replica != nullptr && !replica->is_alone()) {
    output = replicated_batch_norm(input, state.weight, state.bias, settings, *replica, statistics);
  } else {
    const auto record = c10::make_intrusive<BatchNormRecord>();
    record->settings = settings;
    output = synchronised_batch_norm(input, state.weight, state.bias, record);
    statistics = record->statistics;
  }
  nonfinite = holds_nonfinite(statistics);
  const bool keeps = nonfinite && options.on_nonfinite() == OnNonfinite::keep_running_stats;
  if (counts && !keeps) Tensor(state.num_batches_tracked) += 1;
  return output;
}

std::string describe(const SyncBatchNormOptions& options) {
  return fmt::format("d({}, eps={}{}, momentum={}, affine={}, track_running_stats={}, group={})",
                     options.num_features(), options.eps(),
                     options.eps_mode() == EpsMode::clamp ? " (clamp)" : "",
                     options.momentum() ? fmt::format("{}", *options.momentum()) : "none",
                     options.affine(), options.track_running_stats(), options.group().name());
}

}  // namespace

SyncBatchNormOptions::SyncBatchNormOptions(const torch::nn::BatchNormOptions& options, Group group)
    : num_features_(options.num_features()),
      eps_(options.eps()),
      affine_(options.affine()),
      track_running_stats_(options.track_running_stats()),
      group_(std::move(group)) {
  momentum_.reset();
  if (options.momentum().has_value()) momentum_ = *options.momentum();
}

torch::nn::BatchNormOptions SyncBatchNormOptions::without_group() const {
  auto options = torch::nn::BatchNormOptions(num_features_)
                     .eps(eps_)
                     .affine(affine_)
                     .track_running_stats(track_running_stats_);
  options.momentum().reset();
  if (momentum_.has_value()) options.momentum() = *momentum_;
  return options;
}

template <std::size_t D, class Derived>
Tensor SyncBatchNormImplBase<D, Derived>::forward(const Tensor& input) {
  const std::string name = fmt::format("SyncBatchNorm{}d", D);
  _check_input_dim(input);
  if (!this->is_training()) {  // nothing to synchronise, and nothing torch does not do
    const bool batch_statistics = !this->running_mean.defined() || !this->running_var.defined();
    const SuspendedScope suspended;
    return at::batch_norm(input, this->weight, this->bias, this->running_mean, this->running_var,
                          batch_statistics, /*momentum=*/0, this->options.eps(),
                          /*cudnn_enabled=*/false);
  }
  const auto& o = this->options;
  bool nonfinite = false;
  Tensor output = train(input, {this->weight, this->bias, this->num_batches_tracked},
                        {o.group(), o.eps(), o.eps_mode(), /*factor=*/0, this->running_mean,
                         this->running_var, o.on_nonfinite()},
                        o, replica_.get(),
                        context_of(name, o.group(), std::source_location::current()), nonfinite);
  n_nonfinite_batches_ += nonfinite ? 1 : 0;
  return output;
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::_check_input_dim(const Tensor& input) {
  const std::int64_t n_dims = input.defined() ? input.dim() : 0;
  const auto full = static_cast<std::int64_t>(D) + 2;
  if (n_dims == full || (D == 1 && n_dims == 2)) return;
  throw UsageError(context_of(fmt::format("SyncBatchNorm{}d", D), this->options.group(),
                              std::source_location::current()),
                   fmt::format("expected {}D input, got {}D input",
                               D == 1 ? std::string("2D or 3") : std::to_string(full), n_dims));
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::pretty_print(std::ostream& stream) const {
  stream << "lockstep::nn::SyncBatchNorm" << D << describe(this->options);
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::on_replicate(CallbackContext& context, int copy_id) {
  replica_ = detail::ReplicaLink::join(context, copy_id);
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::on_failure(const std::exception_ptr& error) {
  if (replica_) replica_->fail(error);
}

template class SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>;
template class SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>;
template class SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>;

}  // namespace lockstep::nn
