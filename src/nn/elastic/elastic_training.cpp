#include <ATen/Context.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/elastic.hpp>
#include <lockstep/objects.hpp>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "engines/shared/bootstrap/shared_world.hpp"
#include "nn/ddp/sharded_state.hpp"
#include "nn/error.hpp"
#include "nn/tensors/checkpoint_file.hpp"
#include "nn/tensors/hash.hpp"
#include "nn/tensors/training_parts.hpp"
#include "world/session.hpp"

namespace lockstep::nn {
namespace {

/// Leaves run_elastic's function after a complete step, to let replacements in. Not a
/// std::exception, so that the function's own handlers of those let it pass.
struct ReplacementsWait {};

/// A default generator of torch, and its state.
struct KeptGenerator {
  at::Generator generator;
  at::Tensor state;

  void keep() {
    const std::lock_guard lock(generator.mutex());
    state = generator.get_state();
  }
  void set_back() {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
  void seed(std::uint64_t seed) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
};

bool is_module(const TrainingPart& part) { return part.module() != nullptr; }

}  // namespace

/// A rank's training between two calls of run_elastic's function.
struct ElasticState::Implementation {
  std::vector<TrainingPart> parts;
  ElasticOptions options;
  std::int64_t step = 0;
  bool has_state = false;   ///< it has had the state of all ranks
  bool is_running = false;  ///< in run_elastic
  bool is_elastic = false;  ///< and a step may have to be repeated
  std::int64_t n_runs = 0;  ///< calls of run_elastic in this process, with this one
  /// Of the parameters at the beginning of the present step: see sample_parameters.
  std::vector<std::byte> samples{};

  // What a repetition of the present step begins with, beside parameters and optimizers.
  std::vector<KeptGenerator> generators{};
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers{};  ///< and their values
  std::vector<std::optional<double>> learning_rates{};       ///< of all groups of the optimizers
  std::vector<TrainingPart> others{};                        ///< all parts, with a snapshot
  std::string values_of_others{};

  explicit Implementation(std::initializer_list<TrainingPart> all, ElasticOptions with)
      : parts(all), options(with) {
    for (const TrainingPart& part : parts) {
      if (detail::ShardedState::find(part.optimizer()) != nullptr) {
        throw UsageError({.operation = "ElasticState"},
                         "ElasticState does not support ZeroRedundancyOptimizer: a part of its "
                         "state is lost with each rank. Use the plain optimizer");
      }
      const bool is_kept_otherwise = is_module(part) || part.optimizer() != nullptr;
      if (options.snapshot || !is_kept_otherwise) others.push_back(part);
    }
  }

  template <class F>
  void for_each_parameter(F f) const {
    for (const TrainingPart& part : parts) {
      if (is_module(part)) {
        for (const at::Tensor& parameter : part.module()->parameters()) f(parameter);
      } else if (part.optimizer() != nullptr) {
        for (const auto& group : part.optimizer()->param_groups()) {
          for (const at::Tensor& parameter : group.params()) f(parameter);
        }
      }
    }
  }

  /// Some values of each parameter, by which a change of all of them shows. Not their versions:
  /// libtorch's optimizers write through Tensor::data(), which has a version of its own. On a
  /// device, where reading them costs a synchronisation: none.
  std::vector<std::byte> sample_parameters() const {
    constexpr std::size_t kSamples = 16;
    std::vector<std::byte> bytes;
    for_each_parameter([&](const at::Tensor& parameter) {
      if (!parameter.is_cpu() || parameter.layout() != at::kStrided) return;
      const at::Tensor values = parameter.detach();
      if (!values.is_non_overlapping_and_dense()) return;
      const auto* const data = static_cast<const std::byte*>(values.data_ptr());
      const auto n = static_cast<std::size_t>(values.numel());
      const std::size_t n_bytes = static_cast<std::size_t>(values.element_size());
      for (std::size_t i = 0; i < n; i += std::max<std::size_t>(n / kSamples, 1)) {
        bytes.insert(bytes.end(), data + i * n_bytes, data + (i + 1) * n_bytes);
      }
    });
    return bytes;
  }

  template <class F>
  void for_each_options(F f) const {
    for (const TrainingPart& part : parts) {
      if (part.optimizer() == nullptr) continue;
      auto& optimizer = const_cast<torch::optim::Optimizer&>(*part.optimizer());
      for (auto& group : optimizer.param_groups()) f(group.options());
    }
  }

  /// Of CPUs, and of the devices of the parameters.
  void find_generators() {
    std::vector<at::Device> devices{at::kCPU};
    for_each_parameter([&](const at::Tensor& parameter) {
      const at::Device device = parameter.device();
      if (device.is_cuda() && std::ranges::count(devices, device) == 0) devices.push_back(device);
    });
    generators.resize(devices.size());  // those that are there keep the states of the present step
    for (std::size_t i = 0; i < devices.size(); ++i) {
      if (generators[i].generator.defined()) continue;
      generators[i].generator = at::globalContext().defaultGenerator(devices[i]);
      generators[i].keep();
    }
  }

  /// The present step begins with what is now.
  void keep() {
    if (!is_elastic) return;
    const at::NoGradGuard no_graph;
    std::size_t n = 0;
    if (!options.snapshot) {
      for (const TrainingPart& part : parts) {
        if (!is_module(part)) continue;
        for (const at::Tensor& buffer : part.module()->buffers()) {
          if (!buffer.defined()) continue;
          if (n < buffers.size() && buffers[n].first.is_same(buffer) &&
              buffers[n].second.sizes() == buffer.sizes()) {
            buffers[n].second.copy_(buffer);
          } else {
            buffers.resize(n);
            buffers.emplace_back(buffer, buffer.clone());
          }
          ++n;
        }
      }
    }
    buffers.resize(n);
    learning_rates.clear();
    for_each_options([&](const auto& group) {
      try {
        learning_rates.emplace_back(group.get_lr());
      } catch (const c10::Error&) {  // an optimizer of the program's own may not tell it
        learning_rates.emplace_back();
      }
    });
    if (!options.snapshot) samples = sample_parameters();
    if (!others.empty()) values_of_others = parts_in_memory(others);
    for (KeptGenerator& generator : generators) generator.keep();
  }

  /// Undoes the part of the present step that was computed.
  void set_back() {
    const at::NoGradGuard no_graph;
    for (const auto& [buffer, value] : buffers) {
      if (buffer.sizes() == value.sizes()) {
        buffer.copy_(value);
      } else {
        buffer.set_data(value.clone());
      }
    }
    if (!others.empty()) load_parts(values_of_others, others);
    auto rate = learning_rates.begin();
    for_each_options([&](auto& group) {
      if (rate == learning_rates.end()) return;
      if (*rate) group.set_lr(**rate);
      ++rate;
    });
    for (KeptGenerator& generator : generators) generator.set_back();
  }

  /// Before the ranks compute the present step.
  void begin_step(const Group& group) {
    if (!options.seed) return;
    // Neighbouring steps and ranks get seeds that have nothing in common.
    const std::array of{*options.seed, static_cast<std::uint64_t>(step),
                        static_cast<std::uint64_t>(group.rank())};
    const std::uint64_t seed = hash_of_bytes(of.data(), sizeof of);
    for (KeptGenerator& generator : generators) generator.seed(seed);
  }

  void check_others(const std::vector<std::array<std::int64_t, 4>>& all, std::int64_t newest,
                    const Group& group, std::source_location where) const {
    if (!is_elastic) return;
    if (newest < 0 && internal::session()->elastic()->has_earlier_steps()) {
      throw EngineError(context_of("run_elastic", group, where),
                        "all ranks that had the state are lost; restart from a checkpoint");
    }
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r][3] == n_runs) continue;
      throw UsageError(context_of("run_elastic", group, where),
                       fmt::format("this rank is in its call #{} of run_elastic, and rank {} in "
                                   "call #{}: a replacement begins the program anew, so a program "
                                   "makes one call",
                                   n_runs, r, all[r][3]));
    }
  }

  /// Collective: gives all ranks the state of those with the newest complete step.
  void synchronise(std::source_location where) {
    const Group group = default_group();
    for_each_parameter([](const at::Tensor& parameter) {
      if (parameter.grad().defined()) parameter.mutable_grad() = at::Tensor();
    });
    const bool has_changed = has_state && !options.snapshot && sample_parameters() != samples;
    const std::array mine{has_state ? step : -1, step, std::int64_t{has_changed}, n_runs};
    const auto all = all_gather_object(mine, group, {}, where);
    const std::int64_t newest = std::ranges::max(all)[0];
    const auto is_newest = [&](const auto& rank) { return rank[0] == newest; };
    check_others(all, newest, group, where);
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (!is_newest(all[r]) || all[r][2] == 0) continue;
      throw UsageError(
          context_of("run_elastic", group, where),
          fmt::format("rank {} cannot repeat step {}, which was not complete: it has changed "
                      "parameters already. Call step_done() right after Optimizer::step, before "
                      "any other operation of the ranks, or set ElasticOptions::snapshot",
                      r, newest));
    }
    const bool mine_is_newest = mine[0] == newest;
    if (has_state && mine_is_newest) set_back();
    find_generators();
    if (!std::ranges::all_of(all, is_newest) || newest < 0) {
      const auto source = static_cast<int>(std::ranges::find_if(all, is_newest) - all.begin());
      std::string state;
      if (group.rank() == source) state = parts_in_memory(parts);
      broadcast_object(state, source, group, {}, where);
      const bool is_loaded = group.rank() != source && (newest < 0 || !mine_is_newest);
      const auto failure =
          is_loaded ? failure_text([&] { load_parts(state, parts); }) : std::nullopt;
      if (!failure) step = all[static_cast<std::size_t>(source)][1];
      if (is_loaded && !failure) {  // also if that rank is lost before all others have loaded it
        has_state = true;
        keep();
      }
      const auto failures = all_gather_object(failure, group, {}, where);
      for (std::size_t r = 0; r < failures.size(); ++r) {
        if (!failures[r]) continue;
        throw UsageError(context_of("run_elastic", group, where),
                         fmt::format("rank {} cannot take the state of rank {}, read as a file: {}",
                                     r, source, *failures[r]));
      }
    }
    has_state = true;
    keep();
    begin_step(group);
  }
};

ElasticState::ElasticState(std::initializer_list<TrainingPart> parts, ElasticOptions options)
    : implementation_(std::make_unique<Implementation>(parts, options)) {}

ElasticState::~ElasticState() = default;

std::int64_t ElasticState::step() const noexcept { return implementation_->step; }

void ElasticState::set_step(std::int64_t step) {
  Implementation& mine = *implementation_;
  if (step < 0) {
    throw UsageError({.operation = "set_step"}, fmt::format("{} is negative", step));
  }
  mine.step = step;
  if (!mine.is_running) return;
  mine.keep();
  mine.begin_step(default_group());
}

void ElasticState::step_done(std::source_location where) {
  Implementation& mine = *implementation_;
  const Group& group = default_group();
  if (!mine.is_running) {
    throw UsageError(context_of("step_done", group, where), "is for the function of run_elastic");
  }
  ++mine.step;
  mine.keep();
  if (mine.is_elastic) {
    const bool waits =
        all_reduce_value(replacements_wait() ? 1 : 0, ReduceOp::max, group, {}, where) != 0;
    lockstep::step_done();
    if (waits) throw ReplacementsWait();
  }
  mine.begin_step(group);
}

double ElasticState::scale(std::size_t own, std::source_location where) {
  const Group& group = default_group();
  const auto all =
      all_reduce_value(static_cast<std::int64_t>(own), ReduceOp::sum, group, {}, where);
  if (all == 0) {
    throw UsageError(context_of("scale", group, where), "no rank has a sample in this step");
  }
  return static_cast<double>(own) * group.size() / static_cast<double>(all);
}

void run_elastic(ElasticState& state, const std::function<void()>& train,
                 const InitOptions& options, std::source_location where) {
  ElasticState::Implementation& mine = *state.implementation_;
  const internal::Session* const session = internal::session();
  if (session == nullptr || session->elastic() != nullptr) init_dist(options, where);
  mine.is_elastic = internal::session()->elastic() != nullptr;
  const auto& segment = internal::session()->world().segment;
  if (!mine.is_elastic && segment && shared::is_elastic(*segment)) {
    throw UsageError(context_of("run_elastic", default_group(), where),
                     fmt::format("`lockstep run --elastic` keeps a world of the shared engine "
                                 "running, and this one is over {}: leave the backend out, or "
                                 "--elastic",
                                 default_group().backend()));
  }
  mine.is_running = true;
  if (mine.is_elastic) {
    static std::int64_t n_runs = 0;
    mine.n_runs = ++n_runs;
  }
  struct Ends {
    ElasticState::Implementation& mine;
    // The program may change the parts before another run_elastic.
    ~Ends() { mine.is_running = mine.has_state = false; }
  } const ends{mine};
  // Attempts in a row that an error ended without a step, and without a rank that was lost or
  // joined: such as a layer of an earlier world throws at once in each.
  constexpr int kAttemptsWithoutCause = 3;
  for (int n_without_cause = 0; true;) {
    const std::int64_t step = mine.step;
    std::exception_ptr failure;
    try {
      mine.synchronise(where);
      train();
      barrier(default_group(), {}, where);
      return;
    } catch (const ReplacementsWait&) {
    } catch (const PeerLost&) {
      failure = std::current_exception();
    } catch (const PeerFailed&) {
      failure = std::current_exception();
    } catch (const TimeoutError&) {
      failure = std::current_exception();
    }
    if (failure && !mine.is_elastic) std::rethrow_exception(failure);
    const Regrouped world = regroup({}, where);
    const bool has_cause =
        !failure || !world.lost.empty() || !world.joined.empty() || mine.step != step;
    n_without_cause = has_cause ? 0 : n_without_cause + 1;
    if (n_without_cause == kAttemptsWithoutCause) std::rethrow_exception(failure);
  }
}

}  // namespace lockstep::nn
