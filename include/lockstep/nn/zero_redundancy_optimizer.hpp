#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <memory>
#include <source_location>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/group.hpp>
#include <lockstep/world.hpp>

namespace lockstep::nn {

namespace detail {
struct OptimizerClass;
struct ShardedState;

/// Of the optimizer classes of libtorch with elementwise updates, their options; of any other,
/// those of all. Not defined.
template <class Optimizer>
torch::optim::OptimizerOptions options_of(std::type_identity<Optimizer>);
torch::optim::SGDOptions options_of(std::type_identity<torch::optim::SGD>);
torch::optim::AdamOptions options_of(std::type_identity<torch::optim::Adam>);
torch::optim::AdamWOptions options_of(std::type_identity<torch::optim::AdamW>);
torch::optim::RMSpropOptions options_of(std::type_identity<torch::optim::RMSprop>);
torch::optim::AdagradOptions options_of(std::type_identity<torch::optim::Adagrad>);

template <class Optimizer>
using ElementwiseOptions = decltype(options_of(std::type_identity<Optimizer>()));

/// Defined for those with elementwise updates.
template <class Optimizer>
const OptimizerClass& class_of();
}  // namespace detail

/// What a ZeroRedundancyOptimizer is, whatever its class.
class ZeroRedundancyOptimizerBase : public torch::optim::Optimizer {
 public:
  ~ZeroRedundancyOptimizerBase() override;
  ZeroRedundancyOptimizerBase(const ZeroRedundancyOptimizerBase&) = delete;
  ZeroRedundancyOptimizerBase& operator=(const ZeroRedundancyOptimizerBase&) = delete;

  /// Updates this rank's part of the parameters and receives the others' parts. Returns what
  /// `closure` returned, which is called first, with gradients. Collective, closure or not.
  ///
  /// Parameters without a gradient stay as they are. Gradients must be equal on all ranks, as
  /// DistributedDataParallel leaves them: only those of its own part are used on each rank.
  /// Options of a parameter group that the program or a scheduler has changed count from this step
  /// on, and so does a parameter group that was added (add_param_group) on all ranks alike.
  ///
  /// Errors, in addition to those of the group's collectives: UsageError on this rank, as a refused
  /// call of the group (see Group), if a gradient is sparse, the parameters of a group have been
  /// exchanged, or one has got another type, shape or order in memory since (to(), set_data, load);
  /// UsageError in a later world than that of the construction;
  /// MismatchError on every rank, naming the first difference, if options, the number of groups or
  /// of their parameters, or which parameters have gradients differ between the ranks, or the
  /// parameters of an added group. In all these cases nothing is changed. All have the line of the
  /// construction.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Gathers the state of all ranks on rank `to`, where save() may then be called until the next
  /// step, load or consolidate. That rank then has the memory of a plain optimizer's state.
  /// Collective. Throws UsageError if there is no such rank, and as step().
  void consolidate(int to = 0, std::source_location where = std::source_location::current());

  /// Writes what the plain optimizer writes: either may load it, on any number of ranks. Local, on
  /// the rank of the last consolidate; a group of one rank needs none. Throws UsageError if the
  /// state is not here. save_training consolidates by itself.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Takes this rank's part of a state that save() of this optimizer, over any number of ranks, or
  /// of the plain optimizer has written. Needs memory for the whole state while it runs. Local: all
  /// ranks must load the same. Options, as with the plain optimizer, are not loaded; load_training
  /// loads them. Throws UsageError, c10::Error or std::runtime_error if the archive is not that of
  /// such an optimizer over parameters of these shapes; then nothing is changed.
  void load(torch::serialize::InputArchive& archive) override;

  /// Bytes of the optimizer's state on this rank. Local. 0 before the first step, except of
  /// Adagrad.
  std::size_t n_state_bytes() const;

 protected:
  ZeroRedundancyOptimizerBase(std::vector<torch::optim::OptimizerParamGroup> groups,
                              std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                              const detail::OptimizerClass& optimizer, const Group& group,
                              std::source_location where);

 private:
  friend struct detail::ShardedState;
  std::unique_ptr<detail::ShardedState> sharded_;
};

/// An optimizer of libtorch, of which each rank keeps 1/size() of the state (ZeRO, stage 1;
/// Rajbhandari et al., 2020): momentum, averages of squares and the like.
///
///     nn::DistributedDataParallel model(net);
///     nn::ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(net->parameters(), 1e-3);
///
/// `Plain`: torch::optim::SGD, Adam, AdamW, RMSprop or Adagrad, with all their options. The
/// elements of each parameter group, in order, are cut in size() parts that differ by one element
/// at most, so a parameter may be cut. After a step the parameters have the same bits on all ranks
/// and, in float32 and float64, as after a step of the plain optimizer. (libtorch rounds 16-bit and
/// complex numbers otherwise at the end of a vector than within one: there single elements may
/// differ by a rounding.)
///
/// It is used as the plain optimizer is: parameter groups, schedulers, zero_grad, save_training and
/// load_training, assert_in_sync (of its options). What differs: step() and consolidate() are
/// collective, state() is empty, parameters with sparse gradients are refused, and so are
/// DistributedDataParallel::join and ElasticState, which need the state of one rank to be whole.
///
/// Parameters may be of several types and layouts and on CUDA. Updated parts are sent by
/// all_gather, through at most 8 MiB of memory that the ranks of a host share. The version of an
/// updated parameter is incremented, so backward of a graph that saved it before the step throws.
/// Threads: as for the Group.
template <class Plain>
class ZeroRedundancyOptimizer final : public ZeroRedundancyOptimizerBase {
 public:
  using Options = detail::ElementwiseOptions<Plain>;
  static_assert(!std::is_same_v<Options, torch::optim::OptimizerOptions>,
                "lockstep: ZeroRedundancyOptimizer takes torch::optim::SGD, Adam, AdamW, RMSprop "
                "and Adagrad, whose updates are elementwise: use any other optimizer as it is");

  /// Collective over the group. Throws MismatchError on every rank, naming the first difference, if
  /// parameters, their values or options differ between the ranks; construct it after
  /// DistributedDataParallel, which makes them equal, or seed all ranks alike. UsageError if a
  /// tensor is listed twice, shares memory with another, is not a dense tensor on a CPU or CUDA
  /// device or has elements that share memory; c10::Error for options that the plain optimizer
  /// rejects: both before anything is sent, as a refused call of the group.
  explicit ZeroRedundancyOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups,
                                   const Options& defaults = {},
                                   const Group& group = default_group(),
                                   std::source_location where = std::source_location::current())
      : ZeroRedundancyOptimizerBase(std::move(groups), std::make_unique<Options>(defaults),
                                    detail::class_of<Plain>(), group, where) {}
  explicit ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, const Options& defaults = {},
                                   const Group& group = default_group(),
                                   std::source_location where = std::source_location::current())
      : ZeroRedundancyOptimizer(
            std::vector{torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults, group,
            where) {}
};

}  // namespace lockstep::nn
