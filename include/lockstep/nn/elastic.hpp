#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include <lockstep/elastic.hpp>
#include <lockstep/group.hpp>
#include <lockstep/nn/checkpoint.hpp>
#include <lockstep/world.hpp>

/// Training that goes on after lost ranks, under `lockstep run --elastic MIN[:MAX]`.
namespace lockstep::nn {

class ElasticState;

/// Options of ElasticSampler.
struct ElasticSamplerOptions {
  std::size_t global_batch;  ///< samples of a step, on all ranks together
  bool shuffle = true;       ///< a new order in every epoch, the same on all ranks
  std::uint64_t seed = 0;    ///< the same on all ranks
  bool drop_last = false;    ///< leave out the last step of an epoch if it has fewer samples
  /// Into how many parts a step's samples are divided, for gradients that are accumulated over
  /// several calls of backward before one Optimizer::step.
  std::size_t micro_batches = 1;
  /// That of DistributedDataParallelOptions::shards: a rank gets the samples of its shards, one
  /// after the other. 0: each rank is one.
  int shards = 0;
};

/// The steps of an epoch that are not complete: see ElasticSampler::steps.
class ElasticSteps {
 public:
  class Iterator {
   public:
    std::int64_t operator*() const { return step_; }
    /// Throws UsageError if the state has not completed the step, and that one alone.
    Iterator& operator++();
    bool operator==(std::default_sentinel_t) const { return step_ >= end_; }

   private:
    friend class ElasticSteps;
    Iterator(const ElasticState& state, std::int64_t end);
    const ElasticState* state_;
    std::int64_t step_;
    std::int64_t end_;
  };
  Iterator begin() const { return {state_, end_}; }
  std::default_sentinel_t end() const { return {}; }

 private:
  friend class ElasticSampler;
  ElasticSteps(const ElasticState& state, std::int64_t end) : state_(state), end_(end) {}
  const ElasticState& state_;
  std::int64_t end_;
};

/// Which samples each rank takes in each step: a function of the step and of the ranks alone, so
/// that any number of ranks computes the same steps. Step k of an epoch consists of the positions
/// k * global_batch to (k + 1) * global_batch - 1 of the epoch's order, which is that of
/// DistributedSampler; rank r of n, or shard r of n, takes every n-th of them, from the r-th on.
/// Threads: one.
class ElasticSampler {
 public:
  /// Throws UsageError if there are no samples, no step, no micro-batch, or fewer than 0 shards;
  /// batch, if there are fewer shards than ranks.
  ElasticSampler(std::size_t n_samples, const ElasticSamplerOptions& options);
  std::size_t steps_per_epoch() const noexcept;
  std::size_t epoch_of(std::int64_t step) const noexcept;
  /// How many samples a step has, on all ranks together.
  std::size_t n_samples(std::int64_t step) const noexcept;
  /// The samples of this rank in a step, counted over all epochs. May be empty where there are
  /// fewer samples than ranks.
  std::vector<std::size_t> batch(std::int64_t step, const Group& group = default_group()) const;
  /// Of one of its micro-batches: consecutive parts of the step's samples, as equal as possible.
  /// Throws UsageError if there is no such one.
  std::vector<std::size_t> batch(std::int64_t step, std::size_t micro_batch,
                                 const Group& group = default_group()) const;
  /// The steps of the state's present epoch that are not complete, in the body of each of which
  /// step_done completes it: `for (const std::int64_t step : sampler.steps(state))`. None where
  /// only the end of the epoch is to be completed. Throws UsageError if the training has resumed
  /// from a file whose epochs had another number of steps, as does ElasticState::epochs.
  ElasticSteps steps(const ElasticState& state,
                     std::source_location where = std::source_location::current()) const;

 private:
  struct Range {
    std::size_t first, end;  ///< positions in the order of an epoch
  };
  Range range_of(std::int64_t step) const noexcept;
  std::vector<std::size_t> part_of(std::int64_t step, Range range, const Group& group) const;

  std::size_t n_samples_;
  ElasticSamplerOptions options_;
  mutable std::optional<std::size_t> epoch_{};
  mutable std::vector<std::size_t> order_{};
};

/// Options of ElasticState.
struct ElasticOptions {
  /// Keeps a copy of all parts at each completed step, not only of the buffers of modules (running
  /// statistics), numbers and other objects. Needed where a step changes parameters before its last
  /// collective operation: several optimizers, as in a GAN. Costs what saving the parts in memory
  /// costs, at each step.
  bool snapshot = false;
  /// Seeds torch's default generators from (seed, step, ends of epochs, rank) before each step.
  /// Then two runs whose worlds have the same sizes at the same steps compute the same, bit for
  /// bit. Unset: the generators' states are set back where a step is repeated; a rank that gets the
  /// state gets them too if all ranks have drawn alike until then, and otherwise has its own.
  std::optional<std::uint64_t> seed{};
  /// Parameters of the parts that no optimizer of the parts steps, although they get gradients: the
  /// program changes them itself. Of a module: module->parameters().
  std::vector<at::Tensor> by_hand{};
  /// Rank 0 saves the state to this file, as save_training does (load_training reads the parts of
  /// it): when run_elastic begins, every save_every steps, and when the training is complete. If
  /// the file exists when no rank has a state, the training resumes from it: the same command goes
  /// on after all ranks were lost. Empty: no file.
  std::string save{};
  std::int64_t save_every = 0;  ///< 0: at the end of each epoch
};

/// The epochs of a training that are not over: see ElasticState::epochs.
class ElasticEpochs {
 public:
  class Iterator {
   public:
    /// The epoch, from 0 on.
    std::size_t operator*() const;
    /// Completes the end of the epoch. Collective over the world. Throws what step_done throws;
    /// UsageError if its steps are not complete.
    Iterator& operator++();
    bool operator==(std::default_sentinel_t) const;

   private:
    friend class ElasticEpochs;
    explicit Iterator(const ElasticEpochs& of) : of_(&of) {}
    const ElasticEpochs* of_;
  };
  Iterator begin() const { return Iterator(*this); }
  std::default_sentinel_t end() const { return {}; }

 private:
  friend class ElasticState;
  ElasticEpochs(ElasticState& state, std::size_t steps_per_epoch, std::size_t n,
                std::source_location where)
      : state_(state), steps_per_epoch_(steps_per_epoch), n_(n), where_(where) {}
  ElasticState& state_;
  std::size_t steps_per_epoch_, n_;
  std::source_location where_;
};

/// What a training is made of, and how far it is: what run_elastic keeps over a loss. The number of
/// the state is the pair (completed steps, completed ends of epochs). Threads: one.
class ElasticState {
 public:
  /// `parts`: references to what training changes, in an order that is the same on all ranks, as
  /// for save_training. A module must be the one that is trained, not a DistributedDataParallel,
  /// which run_elastic's function makes anew. Of parts belong to the state also, without being
  /// listed: which gradients are defined (not their values), requires_grad, the modules' training
  /// modes, the optimizers' options, and torch's default generators.
  explicit ElasticState(std::initializer_list<TrainingPart> parts, ElasticOptions options = {});
  ~ElasticState();
  ElasticState(const ElasticState&) = delete;
  ElasticState& operator=(const ElasticState&) = delete;

  /// How many steps are complete: the number of the present one.
  std::int64_t step() const noexcept;
  /// How many ends of epochs are complete; 0 before the first call of epochs().
  std::int64_t epoch_ends() const noexcept;
  /// For a training that resumes from a file of its own: before run_elastic, or inside its function
  /// on all ranks right after load_training, where the parts as they are now are then those after
  /// `step` steps. epoch_ends unset: the ends of all epochs whose steps are complete. Throws
  /// UsageError for a negative number.
  void set_step(std::int64_t step, std::optional<std::int64_t> epoch_ends = {});

  /// Loads what ElasticOptions::save has written, on rank 0: inside run_elastic's function, to
  /// begin from another file than that. Collective. Throws UsageError on every rank if rank 0
  /// cannot read the file, or if it does not fit on a rank.
  void load(const std::string& path, std::source_location where = std::source_location::current());

  /// Ends a step, right after Optimizer::step: a rank has completed the step when it calls this.
  /// One step is one step of each optimizer. Lets replacements in, if any wait: then it does not
  /// return, but leaves run_elastic's function by an exception (not a std::exception) that
  /// run_elastic catches, so that what follows in the loop is left out. Collective over the world;
  /// where no launcher keeps it running, this only counts.
  ///
  /// Throws what all_reduce throws; UsageError outside run_elastic; UsageError if a parameter that
  /// no optimizer of the parts steps has got a gradient, unless it is in ElasticOptions::by_hand;
  /// UsageError if gradients are large enough to have changed parameters, and none has changed:
  /// accumulate with ElasticSamplerOptions::micro_batches. Whether parameters have changed is seen
  /// by 16 values of each, on CPUs only: a step that changes others, or on a device, before a loss
  /// is repeated from the changed ones.
  void step_done(std::source_location where = std::source_location::current());
  /// Steps each of the optimizers, which are parts, and ends the step, with no collective operation
  /// between: no loss can come between two of them, nor before the end. Call it after backward, as
  /// `state.step_done({optimizer})`.
  void step_done(std::initializer_list<std::reference_wrapper<torch::optim::Optimizer>> optimizers,
                 std::source_location where = std::source_location::current());
  /// The same with a function that changes the parts, without a collective operation.
  void step_done(const std::function<void()>& change,
                 std::source_location where = std::source_location::current());

  /// The epochs from the present one to the n-th:
  ///     for (const std::size_t epoch : state.epochs(sampler, 10)) {
  ///       for (const std::int64_t step : sampler.steps(state)) { ...; state.step_done(); }
  ///       validate(model);  // the end of the epoch
  ///     }
  /// What stands after the inner loop is the end of the epoch. It is complete when the outer loop
  /// goes on: then the state is kept, and replacements are let in, as by step_done. It runs once
  /// for each epoch, or again where a loss falls into it; where only the end was not complete, the
  /// function of run_elastic begins with that epoch, and without steps. It must not change
  /// parameters; schedules, numbers and training modes it may.
  ElasticEpochs epochs(const ElasticSampler& sampler, std::size_t n,
                       std::source_location where = std::source_location::current());

  /// The factor for the loss of a rank that computes the mean over its `own` samples:
  /// own * ranks / samples of all ranks. With it, the gradients that DistributedDataParallel
  /// averages are those of the mean over all samples, also if ranks have different numbers of them.
  /// Collective over the world. Throws what all_reduce throws, UsageError if no rank has a sample.
  double scale(std::size_t own, std::source_location where = std::source_location::current());
  /// The same for a step of `of` samples, as ElasticSampler::n_samples tells: own * ranks / of. Not
  /// collective. Also for micro-batches, whose gradients then add up to the mean over the step.
  double scale(std::size_t own, std::size_t of) const;

 private:
  friend void run_elastic(ElasticState&, const std::function<void()>&, const InitOptions&,
                          std::source_location);
  friend class ElasticSampler;
  friend class ElasticEpochs;
  void complete_end(std::size_t steps_per_epoch, std::source_location where);
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

/// Joins the world (init_dist), calls `train`, and calls it again whenever a rank is lost or a
/// replacement joins, until it returns on all ranks:
///
///     nn::ElasticState state({model, optimizer}, {.save = "training.pt"});
///     const nn::ElasticSampler sampler(data.size(), {.global_batch = 64});
///     nn::run_elastic(state, [&] {
///       nn::DistributedDataParallel ddp(model);
///       nn::SyncBatchNormScope scope;
///       for (const std::size_t epoch : state.epochs(sampler, 10)) {
///         for (const std::int64_t step : sampler.steps(state)) {
///           const auto [images, labels] = data.batch(sampler.batch(step));
///           const auto loss = nll_loss(ddp.forward(images), labels) * state.scale(labels.size(0));
///           optimizer.zero_grad();
///           loss.backward();
///           state.step_done({optimizer});
///         }
///         report(epoch, validate(model));
///       }
///     });
///
/// Before each call all ranks have the same state: that of the ranks with the newest completed step
/// or end of an epoch goes to the others, in memory; gradients are zero, or undefined where they
/// were. A step that was not complete is repeated. Groups and DistributedDataParallel must be
/// made inside `train`: those of an earlier call belong to a world that is over (UsageError).
/// Layers find the world again, unless a split group was given.
///
/// A loss is a PeerLost, PeerFailed or TimeoutError that leaves `train`. Any other exception leaves
/// run_elastic; for the others this rank is then lost, when its process ends. Throws UsageError on
/// every rank if a step that is not complete has changed parameters and there is no snapshot (seen
/// by some values of each parameter on CPUs; not where few values change, and not on GPUs), or if
/// the file of ElasticOptions::save does not fit or cannot be read; UsageError on a rank that
/// cannot take the state of the others, which go on; UsageError if the world is not one of the
/// shared engine, under `lockstep run --elastic`; EngineError if the launcher ends the job, because
/// too few ranks are left, or if all ranks that had a completed step are lost and there is no file;
/// the error itself if three attempts in a row end by one without a step, and without a rank that
/// was lost or joined. A program calls it once: a replacement begins with the first call, which is
/// a UsageError beside a second one. Where nobody keeps the world running (another launcher,
/// `lockstep run` without --elastic), this is an ordinary training of which a loss is the end: its
/// exception leaves run_elastic. The process stays in the world. Called in such a world, on threads
/// of run_ranks or after init_dist, it trains in that one; init_dist throws UsageError where a
/// launcher keeps it running.
void run_elastic(ElasticState& state, const std::function<void()>& train,
                 const InitOptions& options = {},
                 std::source_location where = std::source_location::current());

}  // namespace lockstep::nn
