#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <source_location>
#include <vector>

#include <lockstep/elastic.hpp>
#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/nn/checkpoint.hpp>

/// Training that goes on after lost ranks, under `lockstep run --elastic MIN[:MAX]`.
namespace lockstep::nn {

/// Options of ElasticState.
struct ElasticOptions {
  /// Keeps a copy of all parts at each completed step, not only of the buffers of modules (running
  /// statistics), numbers and other objects. Needed where a step changes parameters before its last
  /// collective operation: several optimizers, as in a GAN. Costs what saving the parts in memory
  /// costs, at each step.
  bool snapshot = false;
  /// Seeds torch's default generators from (seed, step, rank) before each step. Then two runs whose
  /// worlds have the same sizes at the same steps compute the same, bit for bit. Unset: each rank
  /// keeps its generators, which are set back where a step is repeated.
  std::optional<std::uint64_t> seed{};
};

/// What a training is made of, and how many steps of it are complete: what run_elastic keeps over a
/// loss. Threads: one.
class ElasticState {
 public:
  /// `parts`: references to what training changes, in an order that is the same on all ranks, as
  /// for save_training. A module must be the one that is trained, not a DistributedDataParallel,
  /// which run_elastic's function makes anew.
  explicit ElasticState(std::initializer_list<TrainingPart> parts, ElasticOptions options = {});
  ~ElasticState();
  ElasticState(const ElasticState&) = delete;
  ElasticState& operator=(const ElasticState&) = delete;

  /// How many steps are complete: the number of the present one.
  std::int64_t step() const noexcept;
  /// For a training that resumes from a file: before run_elastic, or inside its function on all
  /// ranks right after load_training, where the parts as they are now are then those after `step`
  /// steps. Throws UsageError for a negative number.
  void set_step(std::int64_t step);

  /// Ends a step, right after Optimizer::step: a rank has completed the step when it calls this.
  /// Lets replacements in, if any wait: then it does not return, but leaves run_elastic's function
  /// by an exception (not a std::exception) that run_elastic catches, so that what follows in the
  /// loop is left out. Collective over the world; where no launcher keeps it running, this only
  /// counts. Throws what all_reduce throws; UsageError outside run_elastic.
  void step_done(std::source_location where = std::source_location::current());

  /// The factor for the loss of a rank that computes the mean over its `own` samples:
  /// own * ranks / samples of all ranks. With it, the gradients that DistributedDataParallel
  /// averages are those of the mean over all samples, also if ranks have different numbers of them.
  /// Collective over the world. Throws what all_reduce throws, UsageError if no rank has a sample.
  double scale(std::size_t own, std::source_location where = std::source_location::current());

 private:
  friend void run_elastic(ElasticState&, const std::function<void()>&, const InitOptions&,
                          std::source_location);
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

/// Joins the world (init_dist), calls `train`, and calls it again whenever a rank is lost or a
/// replacement joins, until it returns on all ranks:
///
///     nn::ElasticState state({model, optimizer});
///     const nn::ElasticSampler sampler(data.size(), {.global_batch = 64});
///     nn::run_elastic(state, [&] {
///       nn::DistributedDataParallel ddp(model);
///       nn::SyncBatchNormScope scope;
///       while (state.step() < 10'000) {
///         const auto [images, labels] = data.batch(sampler.batch(state.step()));
///         const auto loss = nll_loss(ddp.forward(images), labels) * state.scale(labels.size(0));
///         optimizer.zero_grad();
///         loss.backward();
///         optimizer.step();
///         state.step_done();
///       }
///     });
///
/// Before each call all ranks have the same state: that of the ranks with the newest completed step
/// goes to the others, in memory; gradients are zero. A step that was not complete is repeated.
/// Groups and DistributedDataParallel must be made inside `train`: those of an earlier call belong
/// to a world that is over (UsageError). Layers find the world again, unless a split group was
/// given.
///
/// A loss is a PeerLost, PeerFailed or TimeoutError that leaves `train`. Any other exception leaves
/// run_elastic; for the others this rank is then lost, when its process ends. Throws UsageError on
/// every rank if a step that is not complete has changed parameters and there is no snapshot (seen
/// by some values of each parameter on CPUs; not where few values change, and not on GPUs);
/// EngineError if the launcher ends the job, because too few ranks are left, or if all ranks that
/// had the state are lost; the error itself if three attempts in a row end by one without a step,
/// and without a rank that was lost or joined. A program calls it once: a replacement begins with
/// the first call, which is a UsageError beside a second one. Where nobody keeps the
/// world running (another launcher, `lockstep run` without --elastic), this is an ordinary training
/// of which a loss is the end: its exception leaves run_elastic. The process stays in the world.
/// Called in such a world, on threads of run_ranks or after init_dist, it trains in that one;
/// init_dist throws UsageError where a launcher keeps it running.
void run_elastic(ElasticState& state, const std::function<void()>& train,
                 const InitOptions& options = {},
                 std::source_location where = std::source_location::current());

/// Options of ElasticSampler.
struct ElasticSamplerOptions {
  std::size_t global_batch;  ///< samples of a step, on all ranks together
  bool shuffle = true;       ///< a new order in every epoch, the same on all ranks
  std::uint64_t seed = 0;    ///< the same on all ranks
  bool drop_last = false;    ///< leave out the last step of an epoch if it has fewer samples
};

/// Which samples each rank takes in each step: a function of the step and of the ranks alone, so
/// that any number of ranks computes the same steps. Step k of an epoch consists of the positions
/// k * global_batch to (k + 1) * global_batch - 1 of the epoch's order, which is that of
/// DistributedSampler; rank r of n takes every n-th of them, from the r-th on. Threads: one.
class ElasticSampler {
 public:
  /// Throws UsageError if there are no samples, or no step.
  ElasticSampler(std::size_t n_samples, const ElasticSamplerOptions& options);
  std::size_t steps_per_epoch() const noexcept;
  std::size_t epoch_of(std::int64_t step) const noexcept;
  /// The samples of this rank in a step, counted over all epochs. May be empty where there are
  /// fewer samples than ranks.
  std::vector<std::size_t> batch(std::int64_t step, const Group& group = default_group()) const;

 private:
  std::size_t n_samples_;
  ElasticSamplerOptions options_;
  mutable std::optional<std::size_t> epoch_{};
  mutable std::vector<std::size_t> order_{};
};

}  // namespace lockstep::nn
