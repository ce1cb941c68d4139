#pragma once

#include <torch/nn/modules/batchnorm.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <ostream>
#include <utility>

#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/nn/replication.hpp>

namespace lockstep::nn {

namespace detail {
class ReplicaLink;
}

/// How eps keeps the variance from 0 in training: var + eps as in torch, or max(var, eps) (no
/// gradient then goes through a variance below eps). Eval mode always has var + eps.
enum class EpsMode { plus, clamp };

/// What a training batch that holds a NaN or an infinity, on any rank, does to the running
/// statistics: it gets into them, or they and num_batches_tracked stay as they were. All ranks
/// decide alike. The output is not finite either way.
enum class OnNonfinite { propagate, keep_running_stats };

/// The options of torch::nn::BatchNorm, and the group.
struct SyncBatchNormOptions {
  SyncBatchNormOptions(std::int64_t num_features)  // NOLINT: SyncBatchNorm2d(64), as in torch
      : num_features_(num_features) {}
  explicit SyncBatchNormOptions(const torch::nn::BatchNormOptions& options,
                                Group group = default_group());
  torch::nn::BatchNormOptions without_group() const;

  TORCH_ARG(std::int64_t, num_features);
  TORCH_ARG(double, eps) = 1e-5;
  TORCH_ARG(EpsMode, eps_mode) = EpsMode::plus;
  /// Weight of the new batch in the running statistics; nullopt: the average over all batches.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  TORCH_ARG(bool, affine) = true;
  TORCH_ARG(bool, track_running_stats) = true;
  TORCH_ARG(OnNonfinite, on_nonfinite) = OnNonfinite::propagate;
  /// The ranks that share a batch. Default: the default group of the thread that makes the
  /// options, at that moment: make or convert modules after init_dist, on the rank's own thread.
  TORCH_ARG(Group, group) = default_group();
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
/// Group::all_gather and all_reduce throw. Threads: one forward or backward at a time per Group.
template <std::size_t D, class Derived>
class SyncBatchNormImplBase
    : public torch::nn::NormImplBase<D, Derived, SyncBatchNormOptions>,  // NOLINT: as in torch
      public ReplicationCallback {
 public:
  using torch::nn::NormImplBase<D, Derived, SyncBatchNormOptions>::NormImplBase;

  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;
  void on_replicate(CallbackContext& context, int copy_id) override;
  void on_failure(const std::exception_ptr& error) override;
  /// Training batches with a NaN or an infinity that this module has seen; the same on all ranks.
  std::int64_t n_nonfinite_batches() const { return n_nonfinite_batches_; }

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  std::int64_t n_nonfinite_batches_ = 0;
  std::shared_ptr<detail::ReplicaLink> replica_;  // none where it is no replica
};

/// Input (N, C) or (N, C, L).
class SyncBatchNorm1dImpl : public SyncBatchNormImplBase<1, SyncBatchNorm1dImpl> {
 public:
  using SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>::SyncBatchNormImplBase;
};
TORCH_MODULE(SyncBatchNorm1d);

/// Input (N, C, H, W).
class SyncBatchNorm2dImpl : public SyncBatchNormImplBase<2, SyncBatchNorm2dImpl> {
 public:
  using SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>::SyncBatchNormImplBase;
};
TORCH_MODULE(SyncBatchNorm2d);

/// Input (N, C, D, H, W).
class SyncBatchNorm3dImpl : public SyncBatchNormImplBase<3, SyncBatchNorm3dImpl> {
 public:
  using SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>::SyncBatchNormImplBase;
};
TORCH_MODULE(SyncBatchNorm3d);

extern template class SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>;
extern template class SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>;
extern template class SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>;

}  // namespace lockstep::nn
