#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/elastic.hpp>
#include <lockstep/objects.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engines/shared/bootstrap/shared_world.hpp"
#include "nn/elastic/training.hpp"
#include "nn/error.hpp"
#include "nn/training/checkpoint_file.hpp"
#include "nn/training/training_parts.hpp"
#include "world/session.hpp"

namespace lockstep::nn {

/// What the ranks tell each other before a call of the function.
struct ElasticState::Implementation::Report {
  bool has_state = false;
  Position position{};
  bool has_changed = false;  ///< parameters, in a step that is not complete
  int file = 0;              ///< FileState
  std::int64_t n_runs = 0;
  std::uint64_t generators = 0;  ///< KeptState::hash_of_generators
  bool draw_alike = true;

  template <class Archive>
  void serialize(Archive& archive) {
    archive(has_state, position, has_changed, file, n_runs, generators, draw_alike);
  }
};

void ElasticState::Implementation::write(torch::serialize::OutputArchive& archive) const {
  torch::serialize::OutputArchive mine;
  mine.write("steps", c10::IValue(position.steps));
  mine.write("epoch_ends", c10::IValue(position.ends));
  mine.write("epoch_steps", c10::IValue(epoch_steps));
  mine.write("draw_alike", c10::IValue(draw_alike && !options.seed));
  kept.save(mine);
  archive.write("elastic", mine);
}

void ElasticState::Implementation::load(const std::string& bytes, bool with_generators) {
  load_parts(bytes, kept.parts(), [&](torch::serialize::InputArchive& archive) {
    torch::serialize::InputArchive of_rank;
    if (!archive.try_read("elastic", of_rank)) {
      throw std::runtime_error(
          "the file does not say how many steps are complete: load_training can read it, and "
          "set_step says so");
    }
    c10::IValue steps, ends, of_epoch;
    of_rank.read("steps", steps);
    of_rank.read("epoch_ends", ends);
    of_rank.read("epoch_steps", of_epoch);
    c10::IValue alike(true);
    of_rank.try_read("draw_alike", alike);  // earlier versions did not write it
    draw_alike = alike.toBool();
    kept.load(of_rank, with_generators && draw_alike);
    position = {.steps = steps.toInt(), .ends = ends.toInt()};
    epoch_steps = of_epoch.toInt();
  });
}

void ElasticState::Implementation::load_file(const std::string& path, std::source_location where) {
  const Group group = default_group();
  const std::string bytes = read_archive("run_elastic", path, group, where);
  const auto failure = failure_text([&] { load(bytes, /*with_generators=*/true); });
  if (!failure) keep();  // also if a rank is lost before all have loaded it
  is_resumed = true;
  const auto failures = all_gather_object(failure, group, {}, where);
  for (std::size_t r = 0; r < failures.size(); ++r) {
    if (!failures[r]) continue;
    throw UsageError(context_of("run_elastic", group, where),
                     fmt::format("rank {} cannot resume from {}: {}", r, path, *failures[r]));
  }
}

void ElasticState::Implementation::save(std::source_location where) {
  if (!is_elastic) {  // else at each step
    kept.keep();
    static_cast<void>(compare_ranks(where));
  }
  save_parts(
      "run_elastic", options.save, kept.parts(),
      [this](torch::serialize::OutputArchive& archive) { write(archive); }, default_group(), where);
  file = FileState::current;
}

ElasticState::Implementation::Report ElasticState::Implementation::report() {
  return {.has_state = has_state,
          .position = position,
          .has_changed = has_state && !options.snapshot && kept.have_parameters_changed(),
          .file = static_cast<int>(file),
          .n_runs = n_runs,
          .generators = kept.hash_of_generators(),
          .draw_alike = draw_alike};
}

void ElasticState::Implementation::take(const Report& newest, int source, bool is_start,
                                        bool with_generators, std::source_location where) {
  const Group group = default_group();
  if (is_start) {
    bool is_there = !options.save.empty() && std::filesystem::exists(options.save);
    broadcast_object(is_there, /*src=*/0, group, {}, where);
    if (is_there) return load_file(options.save, where);
    if (is_elastic && internal::session()->elastic()->has_earlier_steps()) {
      throw EngineError(context_of("run_elastic", group, where),
                        "all ranks that had the state are lost; restart from a checkpoint, such "
                        "as ElasticOptions::save writes");
    }
  }
  std::string bytes;
  if (group.rank() == source) {
    bytes = parts_in_memory(kept.parts(), [this](auto& archive) { write(archive); });
  }
  broadcast_object(bytes, source, group, {}, where);
  const bool is_mine =
      group.rank() == source || (!is_start && has_state && position == newest.position);
  const auto failure = is_mine ? std::nullopt : failure_text([&] { load(bytes, with_generators); });
  if (!is_mine && !failure) {  // also if that rank is lost before all others have loaded it
    has_state = true;
    keep();
  }
  const auto failures = all_gather_object(failure, group, {}, where);
  const auto failed = std::ranges::find_if(failures, [](auto& text) { return text.has_value(); });
  if (failed == failures.end()) return;
  if (!is_start && !failure) throw Regroup();  // without those ranks, which end
  const auto rank = failure ? group.rank() : failed - failures.begin();
  throw UsageError(context_of("run_elastic", group, where),
                   fmt::format("rank {} cannot take the state of rank {}, read as a file: {}", rank,
                               source, failure ? *failure : **failed));
}

void ElasticState::Implementation::synchronise(std::source_location where) {
  const Group group = default_group();
  if (!has_state) kept.keep();
  const auto all = all_gather_object(report(), group, {}, where);
  const auto newest = std::ranges::max_element(
      all, {}, [](const Report& rank) { return std::pair(rank.has_state, rank.position); });
  const bool is_start = !newest->has_state;
  const auto is_newest = [&](const Report& rank) {
    return rank.has_state && rank.position == newest->position;
  };
  const ErrorContext context = context_of("run_elastic", group, where);
  for (std::size_t r = 0; r < all.size() && is_elastic; ++r) {
    if (all[r].n_runs == n_runs) continue;
    throw UsageError(context,
                     fmt::format("this rank is in its call #{} of run_elastic, and rank {} "
                                 "in call #{}: a replacement begins the program anew, so "
                                 "a program makes one call",
                                 n_runs, r, all[r].n_runs));
  }
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (!is_newest(all[r]) || !all[r].has_changed) continue;
    throw UsageError(
        context,
        fmt::format("rank {} cannot repeat step {}, which was not complete: it has changed "
                    "parameters already. Let step_done step the optimizers, call it right "
                    "after Optimizer::step, before any other operation of the ranks, or "
                    "set ElasticOptions::snapshot",
                    r, newest->position.steps));
  }
  if (is_start || is_newest(all[static_cast<std::size_t>(group.rank())])) kept.set_back();
  // Ranks that draw alike go on alike; others draw numbers of their own, such as of dropout.
  draw_alike = std::ranges::all_of(all, [&](const Report& rank) {
    const bool counts = is_start || is_newest(rank);
    return !counts || (rank.draw_alike && rank.generators == newest->generators);
  });
  if (!std::ranges::all_of(all, is_newest)) {
    const auto source = is_start ? 0 : static_cast<int>(newest - all.begin());
    take(*newest, source, is_start, /*with_generators=*/!is_start && draw_alike, where);
  }
  has_state = true;
  keep();
  file = static_cast<FileState>(std::ranges::max(all, {}, &Report::file).file);
  // At once, so that a file that cannot be written is an error before the first step.
  if (is_start && !options.save.empty()) file = FileState::due;
  if (file == FileState::due) save(where);
  begin_step();
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
  if (mine.is_elastic) {
    static std::int64_t n_runs = 0;
    mine.n_runs = ++n_runs;
  }
  mine.is_running = true;
  mine.watch.emplace(mine.kept.parts(), mine.options.by_hand);
  // The program may change the parts before another run_elastic.
  const auto end = c10::make_scope_exit([&mine] {
    mine.is_running = mine.has_state = false;
    mine.file = FileState::current;
    mine.watch.reset();
  });
  // Attempts in a row that an error ended without a step, and without a rank that was lost or
  // joined: such as a layer of an earlier world throws at once in each.
  constexpr int kAttemptsWithoutCause = 3;
  for (int n_without_cause = 0; true;) {
    const Position position = mine.position;
    std::exception_ptr failure;
    try {
      mine.synchronise(where);
      train();
      if (mine.file != FileState::current) mine.save(where);
      barrier(default_group(), {}, where);
      internal::finish_elastic();
      return;
    } catch (const Regroup&) {
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
        !failure || !world.lost.empty() || !world.joined.empty() || mine.position != position;
    n_without_cause = has_cause ? 0 : n_without_cause + 1;
    if (n_without_cause == kAttemptsWithoutCause) std::rethrow_exception(failure);
  }
}

}  // namespace lockstep::nn
