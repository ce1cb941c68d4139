#include <c10/util/Type.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/elastic.hpp>
#include <utility>

#include "base/hash.hpp"
#include "nn/ddp/sharded_state.hpp"
#include "nn/elastic/training.hpp"
#include "nn/error.hpp"
#include "nn/training/training_parts.hpp"

namespace lockstep::nn {

ElasticState::Implementation::Implementation(std::initializer_list<TrainingPart> parts,
                                             ElasticOptions with)
    : kept(parts, with.snapshot), options(std::move(with)) {
  for (const TrainingPart& part : parts) {
    if (detail::ShardedState::find(part.optimizer()) == nullptr) continue;
    throw UsageError({.operation = "ElasticState"},
                     "ElasticState does not support ZeroRedundancyOptimizer: a part of its "
                     "state is lost with each rank. Use the plain optimizer");
  }
}

void ElasticState::Implementation::check_running(const char* operation,
                                                 std::source_location where) const {
  if (is_running) return;
  throw UsageError(context_of(operation, default_group(), where),
                   "is for the function of run_elastic");
}

void ElasticState::Implementation::check_gradients(bool is_over, std::source_location where) {
  const ErrorContext context = context_of("step_done", default_group(), where);
  const at::Tensor found = watch->found();
  if (found.defined()) {
    throw UsageError(
        context,
        fmt::format("parameter {} has got a gradient, and no optimizer of the state steps it: the "
                    "state of another one, such as one that is made in the function of "
                    "run_elastic, is lost with each rank. Make the optimizer before run_elastic "
                    "and list it in ElasticState; or list the parameter in "
                    "ElasticOptions::by_hand, if the program changes it without one",
                    name_of_parameter(found, kept.parts())));
  }
  const std::string unused = is_over ? kept.unused_gradient() : "";
  if (!unused.empty()) {
    throw UsageError(
        context,
        fmt::format("no parameter has changed in this step, although {} has a gradient: one step "
                    "is one step of each optimizer. Accumulate gradients within a step "
                    "(ElasticSamplerOptions::micro_batches); call zero_grad() before step_done if "
                    "the step is left out on purpose",
                    unused));
  }
}

void ElasticState::Implementation::use_sampler(std::int64_t n_steps, std::source_location where) {
  if (is_resumed && epoch_steps > 0 && epoch_steps != n_steps) {
    throw UsageError(
        context_of("ElasticSampler", default_group(), where),
        fmt::format("the state that this training has resumed from counts its {} steps in epochs "
                    "of {}, and this sampler's have {}: some samples would be left out, or taken "
                    "twice. Give it the same n_samples, global_batch and drop_last; or say by "
                    "set_step where to go on",
                    position.steps, epoch_steps, n_steps));
  }
  is_resumed = false;
  epoch_steps = epoch_steps == 0 || epoch_steps == n_steps ? n_steps : -1;
}

void ElasticState::Implementation::keep() {
  if (is_elastic) {
    kept.keep();
  } else {
    kept.sample_parameters();
  }
  if (watch) watch->update();
}

void ElasticState::Implementation::begin_step() {
  if (!options.seed) return;
  // Neighbouring steps and ranks get seeds that have nothing in common.
  const std::array of{*options.seed, static_cast<std::uint64_t>(position.steps),
                      static_cast<std::uint64_t>(position.n_ends()),
                      static_cast<std::uint64_t>(default_group().rank())};
  kept.seed_generators(base::hash_of_bytes(of.data(), sizeof of));
}

bool ElasticState::Implementation::compare_ranks(std::source_location where) {
  const auto drawn = static_cast<std::int64_t>(options.seed ? 0 : kept.hash_of_generators());
  std::array most{std::int64_t{is_elastic && has_waiting_replacements()}, drawn, ~drawn};
  all_reduce(std::span(most), {.op = ReduceOp::max}, where);
  draw_alike = draw_alike && most[1] == ~most[2];
  return most[0] != 0;
}

void ElasticState::Implementation::complete(Position next, bool is_saved,
                                            std::source_location where) {
  position = next;
  keep();
  if (!options.save.empty()) file = is_saved ? FileState::due : FileState::behind;
  if (is_elastic) {
    const bool waits = compare_ranks(where);
    lockstep::step_done();
    if (waits) throw Regroup();
  }
  if (file == FileState::due) save(where);
  begin_step();
}

void ElasticState::Implementation::complete_step(std::source_location where) {
  const Position next{.steps = position.steps + 1, .ends = position.ends};
  const std::int64_t every = options.save_every;
  complete(next, /*is_saved=*/every > 0 && next.steps % every == 0, where);
}

ElasticState::ElasticState(std::initializer_list<TrainingPart> parts, ElasticOptions options)
    : implementation_(std::make_unique<Implementation>(parts, std::move(options))) {}

ElasticState::~ElasticState() = default;

std::int64_t ElasticState::step() const noexcept { return implementation_->position.steps; }

std::int64_t ElasticState::epoch_ends() const noexcept {
  return implementation_->position.n_ends();
}

void ElasticState::set_step(std::int64_t step, std::optional<std::int64_t> epoch_ends) {
  Implementation& mine = *implementation_;
  const std::int64_t least = std::min(step, epoch_ends.value_or(0));
  if (least < 0) throw UsageError({.operation = "set_step"}, fmt::format("{} is negative", least));
  mine.position = {.steps = step, .ends = epoch_ends.value_or(-1)};
  mine.epoch_steps = 0;
  if (!mine.is_running) return;
  mine.keep();
  mine.begin_step();
}

void ElasticState::load(const std::string& path, std::source_location where) {
  implementation_->check_running("ElasticState::load", where);
  implementation_->load_file(path, where);
  implementation_->begin_step();
}

void ElasticState::step_done(std::source_location where) {
  Implementation& mine = *implementation_;
  mine.check_running("step_done", where);
  mine.check_gradients(/*is_over=*/true, where);
  mine.complete_step(where);
}

void ElasticState::step_done(
    std::initializer_list<std::reference_wrapper<torch::optim::Optimizer>> optimizers,
    std::source_location where) {
  for (const torch::optim::Optimizer& optimizer : optimizers) {
    const auto is_it = [&](const TrainingPart& part) { return part.optimizer() == &optimizer; };
    if (std::ranges::any_of(implementation_->kept.parts(), is_it)) continue;
    throw UsageError(context_of("step_done", default_group(), where),
                     fmt::format("this {} is not in the ElasticState: its state is lost with each "
                                 "rank. Make it before run_elastic and list it there",
                                 c10::demangle(typeid(optimizer).name())));
  }
  const auto change = [&] {
    for (torch::optim::Optimizer& optimizer : optimizers) optimizer.step();
  };
  step_done(change, where);
}

void ElasticState::step_done(const std::function<void()>& change, std::source_location where) {
  Implementation& mine = *implementation_;
  mine.check_running("step_done", where);
  mine.check_gradients(/*is_over=*/false, where);
  change();
  mine.complete_step(where);
}

ElasticEpochs ElasticState::epochs(const ElasticSampler& sampler, std::size_t n,
                                   std::source_location where) {
  Implementation& mine = *implementation_;
  mine.check_running("epochs", where);
  const auto n_steps = static_cast<std::int64_t>(sampler.steps_per_epoch());
  mine.use_sampler(n_steps, where);
  if (mine.position.ends < 0) {
    mine.position.ends = mine.position.steps / n_steps;
    mine.begin_step();
  }
  return {*this, sampler.steps_per_epoch(), n, where};
}

void ElasticState::complete_end(std::size_t steps_per_epoch, std::source_location where) {
  Implementation& mine = *implementation_;
  mine.check_running("epochs", where);
  const Position& now = mine.position;
  const auto n_steps = static_cast<std::int64_t>(steps_per_epoch);
  if (now.steps != (now.ends + 1) * n_steps) {
    throw UsageError(
        context_of("epochs", default_group(), where),
        fmt::format("the loop goes on after epoch {} with {} of its {} steps complete: "
                    "complete them all, or leave both loops",
                    now.ends, now.steps - now.ends * n_steps, n_steps));
  }
  mine.complete({.steps = now.steps, .ends = now.ends + 1},
                /*is_saved=*/mine.options.save_every == 0, where);
}

double ElasticState::scale(std::size_t own, std::source_location where) {
  const Group& group = default_group();
  const auto all =
      all_reduce_value(static_cast<std::int64_t>(own), ReduceOp::sum, group, {}, where);
  if (all == 0) {
    throw UsageError(context_of("scale", group, where), "no rank has a sample in this step");
  }
  return scale(own, static_cast<std::size_t>(all));
}

double ElasticState::scale(std::size_t own, std::size_t of) const {
  return static_cast<double>(own) * default_group().size() / static_cast<double>(of);
}

std::size_t ElasticEpochs::Iterator::operator*() const {
  return static_cast<std::size_t>(of_->state_.epoch_ends());
}

ElasticEpochs::Iterator& ElasticEpochs::Iterator::operator++() {
  of_->state_.complete_end(of_->steps_per_epoch_, of_->where_);
  return *this;
}

bool ElasticEpochs::Iterator::operator==(std::default_sentinel_t) const {
  return static_cast<std::size_t>(of_->state_.epoch_ends()) >= of_->n_;
}

ElasticSteps ElasticSampler::steps(const ElasticState& state, std::source_location where) const {
  const Position& now = state.implementation_->position;
  const auto n_steps = static_cast<std::int64_t>(steps_per_epoch());
  state.implementation_->use_sampler(n_steps, where);
  const std::int64_t epoch = now.ends < 0 ? now.steps / n_steps : now.ends;
  return {state, (epoch + 1) * n_steps};
}

ElasticSteps::Iterator::Iterator(const ElasticState& state, std::int64_t end)
    : state_(&state), step_(state.step()), end_(end) {}

ElasticSteps::Iterator& ElasticSteps::Iterator::operator++() {
  ++step_;
  if (state_->step() == step_) return *this;
  throw UsageError(context_of("ElasticSampler::steps", default_group(), {}),
                   fmt::format("the loop goes on to step {}, and {} steps are complete: call "
                               "step_done once in each step",
                               step_, state_->step()));
}

}  // namespace lockstep::nn
