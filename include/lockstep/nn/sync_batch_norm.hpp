#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any_value.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <ostream>
#include <source_location>
#include <string>
#include <utility>

#include <lockstep/group.hpp>
#include <lockstep/nn/replication.hpp>

namespace lockstep::nn {

namespace detail {

class ReplicaLink;

/// A layer whose errors name it: by its place in the module tree, where that is known.
class NamedLayer {
 public:
  NamedLayer(std::string type, std::int64_t num_features, std::source_location made_at);
  void set_name(const std::string& name);

 protected:
  std::string type_;
  std::shared_ptr<const std::string> title_;  ///< "SyncBatchNorm2d 'layer3.0.bn1'"
  std::source_location made_at_;
};

/// Gives every such layer below `root` its name.
void name_layers(const torch::nn::Module& root);

}  // namespace detail

/// How eps keeps the variance from 0 in training: var + eps as in torch, or max(var, eps) (no
/// gradient then goes through a variance below eps). Eval mode always has var + eps.
enum class EpsMode { plus, clamp };

/// What a training batch that holds a NaN or an infinity, on any rank, does to the running
/// statistics: it gets into them, or they and num_batches_tracked stay as they were. All ranks
/// decide alike. The output is not finite either way.
enum class OnNonfinite { propagate, keep_running_stats };

/// The options of torch::nn::BatchNorm, and the group.
struct SyncBatchNormOptions {
  SyncBatchNormOptions(  // NOLINT: SyncBatchNorm2d(64), as in torch
      std::int64_t num_features, std::source_location where = std::source_location::current())
      : num_features_(num_features), made_at_(where) {}
  explicit SyncBatchNormOptions(const torch::nn::BatchNormOptions& options,
                                std::optional<Group> group = std::nullopt,
                                std::source_location where = std::source_location::current());
  torch::nn::BatchNormOptions without_group() const;

  TORCH_ARG(std::int64_t, num_features);
  TORCH_ARG(double, eps) = 1e-5;
  TORCH_ARG(EpsMode, eps_mode) = EpsMode::plus;
  /// Weight of the new batch in the running statistics; nullopt: the average over all batches.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  TORCH_ARG(bool, affine) = true;
  TORCH_ARG(bool, track_running_stats) = true;
  TORCH_ARG(OnNonfinite, on_nonfinite) = OnNonfinite::propagate;
  /// The ranks that share a batch. Unset: the default group of the thread that calls forward. The
  /// module keeps the first one that is of a world; so it may be made before init_dist.
  TORCH_ARG(std::optional<Group>, group);

 public:
  /// The line that made the options.
  const std::source_location& made_at() const { return made_at_; }

 private:
  std::source_location made_at_;
};

/// Batch normalisation over the batches of all ranks of a group, as if one rank held them all:
/// outputs, gradients and running statistics are those of torch::nn::BatchNormNd on the
/// concatenated batch. Statistics are the same bits on all ranks.
///
/// Collective in training mode, also under NoGradGuard: one all_gather of 1 + 2C doubles in
/// forward and one all_reduce of 2C doubles in backward (none where the input needs no gradient).
/// Ranks may hold different numbers of samples, one, or none; a rank without samples must still
/// call backward (`output.sum().backward()` does it). In eval mode nothing is sent.
///
/// weight and bias get this rank's share of their gradients, as in PyTorch: the sum over the ranks
/// is the whole; DistributedDataParallel makes it.
///
/// In the replicas of a DataParallel the batch is that of all replicas (of all ranks): they
/// exchange their statistics through a SyncMaster, and the master, copy 0, does the ranks' part.
/// The exchange is a node of the autograd graph, so that backward, on one thread, waits for nobody.
///
/// State: weight, bias, running_mean, running_var, num_batches_tracked, as BatchNormNd.
/// Input: CPU or CUDA, state on the same device; float64 or float32 with a state of its type,
/// bfloat16 or float16 with a float32 state or one of its type (computed in float32, statistics in
/// float64; on CUDA by ATen's kernels, merged in float64 on the host); any strides,
/// channels-last is kept in output and gradient. Errors: UsageError before a byte moves for another
/// shape, type or device; UsageError after the exchange, on every rank, where all ranks together
/// hold one value per channel; both leave the module and the group as they were. Else what
/// Group::all_gather and all_reduce throw. They name the layer, by its place in the module tree
/// where convert_sync_batchnorm or DataParallel has seen the tree, and the line that called
/// forward; inside torch::nn::Sequential, which does not know that line, the one that made or
/// converted the layer. Threads: one forward or backward at a time per Group.
template <std::size_t D, class Derived>
class SyncBatchNormImplBase
    : public torch::nn::NormImplBase<D, Derived, SyncBatchNormOptions>,  // NOLINT: as in torch
      public ReplicationCallback,
      public detail::NamedLayer {
 public:
  explicit SyncBatchNormImplBase(const SyncBatchNormOptions& options_);

  /// where: of the call, for errors.
  at::Tensor forward(const at::Tensor& input,
                     std::source_location where = std::source_location::current());
  void pretty_print(std::ostream& stream) const override;
  void on_replicate(CallbackContext& context, int copy_id) override;
  void on_failure(const std::exception_ptr& error) override;
  /// Training batches with a NaN or an infinity that this module has seen; the same on all ranks.
  std::int64_t n_nonfinite_batches() const { return n_nonfinite_batches_; }

 protected:
  void _check_input_dim(const at::Tensor& input) override;
  /// Sequential calls forward without a line.
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::source_location())})

 private:
  void check_dimensions(const at::Tensor& input, std::source_location where) const;
  Group resolve_group();

  std::int64_t n_nonfinite_batches_ = 0;
  std::shared_ptr<detail::ReplicaLink> replica_;  // none where it is no replica
  Group replica_group_;                           // of the thread that told it
};

/// A TORCH_MODULE whose calls and construction hand on the caller's line.
template <class ImplType>
class SyncBatchNormHolder : public torch::nn::ModuleHolder<ImplType> {
 public:
  using Impl = ImplType;

  explicit SyncBatchNormHolder(const SyncBatchNormOptions& options)
      : SyncBatchNormHolder(std::make_shared<ImplType>(options)) {}
  SyncBatchNormHolder(std::nullptr_t)  // NOLINT: as ModuleHolder
      : torch::nn::ModuleHolder<ImplType>(nullptr) {}
  SyncBatchNormHolder(std::shared_ptr<ImplType> module)  // NOLINT: as ModuleHolder
      : torch::nn::ModuleHolder<ImplType>(std::move(module)) {}

  at::Tensor operator()(const at::Tensor& input,
                        std::source_location where = std::source_location::current()) {
    return this->get()->forward(input, where);
  }
};

/// Input (N, C) or (N, C, L).
class SyncBatchNorm1dImpl : public SyncBatchNormImplBase<1, SyncBatchNorm1dImpl> {
 public:
  using SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>::SyncBatchNormImplBase;
};
class SyncBatchNorm1d : public SyncBatchNormHolder<SyncBatchNorm1dImpl> {
 public:
  using SyncBatchNormHolder<SyncBatchNorm1dImpl>::SyncBatchNormHolder;
};

/// Input (N, C, H, W).
class SyncBatchNorm2dImpl : public SyncBatchNormImplBase<2, SyncBatchNorm2dImpl> {
 public:
  using SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>::SyncBatchNormImplBase;
};
class SyncBatchNorm2d : public SyncBatchNormHolder<SyncBatchNorm2dImpl> {
 public:
  using SyncBatchNormHolder<SyncBatchNorm2dImpl>::SyncBatchNormHolder;
};

/// Input (N, C, D, H, W).
class SyncBatchNorm3dImpl : public SyncBatchNormImplBase<3, SyncBatchNorm3dImpl> {
 public:
  using SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>::SyncBatchNormImplBase;
};
class SyncBatchNorm3d : public SyncBatchNormHolder<SyncBatchNorm3dImpl> {
 public:
  using SyncBatchNormHolder<SyncBatchNorm3dImpl>::SyncBatchNormHolder;
};

extern template class SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>;
extern template class SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>;
extern template class SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>;

}  // namespace lockstep::nn
