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

#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <lockstep/nn/replication.hpp>

namespace lockstep::internal {
struct WorldMembership;
}  // namespace lockstep::internal

namespace lockstep::nn {

namespace detail {

class ReplicaLink;

/// Whether a layer's name is set on all ranks or only on this rank.
enum class Naming { on_all_ranks, on_this_rank };

/// A layer that errors name, by its path in the module tree if that is known.
class NamedLayer {
 public:
  NamedLayer(std::string type, std::int64_t num_features, std::source_location made_at);
  virtual ~NamedLayer() = default;
  void set_name(const std::string& name, Naming naming);
  /// As SyncBatchNormOptions::group.
  virtual void set_group(const std::optional<Group>& group) = 0;
  virtual bool has_group() const = 0;
  /// The group of a training forward on this thread now.
  virtual Group present_group(std::source_location where) const = 0;

 protected:
  std::string type_;
  std::shared_ptr<const std::string> title_;  ///< "SyncBatchNorm2d 'layer3.0.bn1'"
  std::source_location made_at_;
  int tag_;  ///< hash that ranks compare: of the name set on all ranks, else of made_at_
};

/// State of a layer that is one of the replicas of a module. Not copied with the layer.
struct ReplicaState {
  ReplicaState() = default;
  ReplicaState(const ReplicaState& /*other*/) {}
  ReplicaState& operator=(const ReplicaState& /*other*/) { return *this; }  // NOLINT: keeps its own
  ~ReplicaState() = default;

  std::shared_ptr<ReplicaLink> link{};          ///< null if not a replica
  Group group{};                                ///< of the thread that called on_replicate
  std::weak_ptr<torch::nn::Module> original{};  ///< of copy 0; null if not known
};

/// The group to which a layer of an unset group is bound, and the world in which that was.
struct BoundGroup {
  std::optional<Group> group{};
  std::shared_ptr<const internal::WorldMembership> world{};
};

/// Sets the name of every NamedLayer below `root`.
void name_layers(const torch::nn::Module& root, Naming naming);

}  // namespace detail

/// How eps keeps the variance above 0 in training: plus is var + eps as in torch, clamp is
/// max(var, eps) (no gradient flows through a variance below eps). Eval mode always uses var + eps.
enum class EpsMode { plus, clamp };

/// What happens to the running statistics after a training batch with a NaN or an infinity on any
/// rank, or with a mean or variance that overflows their type: propagate updates them with it;
/// keep_running_stats leaves them and num_batches_tracked unchanged. All ranks do the same. The
/// output is the same in either case.
enum class OnNonfinite { propagate, keep_running_stats };

/// The options of torch::nn::BatchNorm, plus those of the synchronisation.
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
  /// Weight of the new batch in the running statistics; nullopt: cumulative average of all batches.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  TORCH_ARG(bool, affine) = true;
  TORCH_ARG(bool, track_running_stats) = true;
  TORCH_ARG(OnNonfinite, on_nonfinite) = OnNonfinite::propagate;
  /// The ranks that share a batch. Unset: the default group of the thread that calls forward; the
  /// module keeps the first it gets in a world, and in the next world (init_dist after
  /// destroy_dist, regroup, another run_ranks) the first that it gets there. The group of a whole
  /// world stands for that of the world now; one split from an earlier world is a UsageError.
  TORCH_ARG(std::optional<Group>, group);

 public:
  /// The source line that constructed the options.
  const std::source_location& made_at() const { return made_at_; }

 private:
  std::source_location made_at_;
};

/// Batch normalisation over the batches of all ranks of a group, as if one rank held them all:
/// outputs, gradients and running statistics are those of torch::nn::BatchNormNd on the
/// concatenated batch. Statistics are bitwise identical on all ranks.
///
/// Collective in training mode, also under NoGradGuard: in forward one all_gather of 1 + 2C doubles
/// on one host, one all_reduce of 4C doubles over several, and one all_reduce of 2C doubles
/// in backward (none if the input needs no gradient). With a core for each rank of one host, an
/// all_reduce of one number precedes them: if the batch fits into no cache, the ranks then take a
/// few channels at a time, each with a message of its own.
/// Ranks may have different numbers of samples, including none; a rank without samples must still
/// call backward (`output.sum().backward()` is enough). No communication in eval mode, which
/// without running statistics uses those of this rank's batch.
///
/// weight and bias get this rank's contribution to their gradients, as in PyTorch: the full
/// gradient is the sum over the ranks, which DistributedDataParallel computes.
///
/// In the replicas of a DataParallel the batch is that of all replicas (of all ranks): they
/// exchange their statistics through a SyncMaster, and the master, copy 0, calls the collectives.
/// The exchange is a node of the autograd graph, so backward, on one thread, never waits.
///
/// State: weight, bias, running_mean, running_var, num_batches_tracked, as BatchNormNd.
/// Input: CPU or CUDA, state on the same device; float64 or float32 with state of the same type,
/// bfloat16 or float16 with state of type float32 or the input's (computed in float32, statistics
/// in float64; on CUDA by ATen's kernels, merged in float64 on the host; a rank alone in its group
/// runs BatchNorm's operator there); any strides,
/// channels-last is kept in output and gradient. Errors: UsageError before any communication for
/// another shape, type or device; UsageError after the exchange, on every rank, if all ranks
/// together have one value per channel; both leave the module and the group unchanged. Otherwise
/// what Group::all_gather and all_reduce throw. Errors name the layer, by its place in the module
/// tree if convert_sync_batchnorm or DataParallel has traversed it, and the line that called
/// forward; inside torch::nn::Sequential, which does not pass that line on, the one that created or
/// converted the layer. MismatchError also if the ranks call different layers of equal width:
/// they compare the name that convert_sync_batchnorm or DistributedDataParallel gave to the
/// layer, otherwise the line that made it. Threads: one forward or backward at a time per Group.
template <std::size_t D, class Derived>
class SyncBatchNormImplBase
    : public torch::nn::NormImplBase<D, Derived, SyncBatchNormOptions>,  // NOLINT: as in torch
      public ReplicationCallback,
      public detail::NamedLayer {
 public:
  explicit SyncBatchNormImplBase(const SyncBatchNormOptions& options_);

  /// where: the source line of the call, for errors.
  at::Tensor forward(const at::Tensor& input,
                     std::source_location where = std::source_location::current());
  void pretty_print(std::ostream& stream) const override;
  void on_replicate(CallbackContext& context, int copy_id) override;
  void on_failure(const std::exception_ptr& error) override;
  void set_group(const std::optional<Group>& group) override;
  bool has_group() const override { return this->options.group().has_value(); }
  Group present_group(std::source_location where) const override;
  /// Number of training batches so far whose statistics were not finite (see OnNonfinite); the same
  /// on all ranks. Of a module in replicas: in which its copies trained.
  /// On CUDA a rank alone counts them on the device, so this call waits for it.
  std::int64_t n_nonfinite_batches() const;

 protected:
  void _check_input_dim(const at::Tensor& input) override;
  /// Sequential calls forward without a source line.
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::source_location())})

 private:
  void check_dimensions(const at::Tensor& input, std::source_location where) const;
  Group bind_group(std::source_location where);
  ErrorContext context(std::source_location where) const;
  /// here: whether a batch was not; there: the same on a device, or undefined.
  void count_nonfinite(bool here, const at::Tensor& there);

  std::int64_t n_nonfinite_batches_ = 0;
  at::Tensor n_nonfinite_on_device_;  ///< undefined: none counted there
  detail::BoundGroup bound_;
  detail::ReplicaState replica_;
};

/// A TORCH_MODULE that passes on the caller's source line in construction and calls.
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
