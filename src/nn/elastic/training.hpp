#pragma once

#include <compare>
#include <cstdint>
#include <lockstep/nn/elastic.hpp>
#include <optional>
#include <source_location>
#include <string>

#include "nn/elastic/gradient_watch.hpp"
#include "nn/elastic/kept_state.hpp"

namespace lockstep::nn {

/// Leaves run_elastic's function for the next generation, without a loss: replacements are let in.
/// Not a std::exception, so that the function's own handlers of those let it pass.
struct Regroup {};

/// How far a training is.
struct Position {
  std::int64_t steps = 0;  ///< completed
  std::int64_t ends = -1;  ///< of epochs, completed; -1: the program has not asked for epochs yet

  std::int64_t n_ends() const { return ends < 0 ? 0 : ends; }
  friend auto operator<=>(const Position&, const Position&) = default;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(steps, ends);
  }
};

/// What the file of ElasticOptions::save has.
enum class FileState : int {
  current,  ///< the present state, or there is no file
  behind,   ///< an earlier one
  due,      ///< an earlier one, and the present one was to be saved
};

/// A rank's training: what it is between two calls of run_elastic's function.
struct ElasticState::Implementation {
  Implementation(std::initializer_list<TrainingPart> parts, ElasticOptions options);

  KeptState kept;
  ElasticOptions options;
  Position position{};
  std::int64_t epoch_steps = 0;  ///< of the samplers that were used; 0: none was; -1: they differ
  bool is_resumed = false;       ///< from a file, and no sampler has been used since
  bool has_state = false;        ///< it has had the state of all ranks
  bool is_running = false;       ///< in run_elastic
  bool is_elastic = false;       ///< and a step may have to be repeated
  /// All ranks have drawn the same numbers until now. Compared at each step, because the ranks that
  /// a lost one leaves, one perhaps, can no longer tell.
  bool draw_alike = true;
  FileState file = FileState::current;
  std::int64_t n_runs = 0;  ///< calls of run_elastic in this process, with this one
  std::optional<GradientWatch> watch{};

  void check_running(const char* operation, std::source_location where) const;
  /// Before parameters are changed, or at the end of a step that has changed them.
  void check_gradients(bool is_over, std::source_location where);
  /// A sampler of epochs of n_steps. Throws UsageError if the file that the training has resumed
  /// from is of others.
  void use_sampler(std::int64_t n_steps, std::source_location where);
  /// The present step begins with what is now.
  void keep();
  void begin_step();
  /// Updates draw_alike; returns whether a replacement waits. Collective.
  bool compare_ranks(std::source_location where);
  /// The step before `next` is complete. Collective.
  void complete(Position next, bool is_saved, std::source_location where);
  void complete_step(std::source_location where);

  void write(torch::serialize::OutputArchive& archive) const;
  void load(const std::string& bytes, bool with_generators);
  void load_file(const std::string& path, std::source_location where);
  void save(std::source_location where);
  /// Gives all ranks the state of those with the newest complete step. Collective.
  void synchronise(std::source_location where);

 private:
  struct Report;
  Report report();
  /// is_start: no rank has a state, so it is that of the file or of the source.
  void take(const Report& newest, int source, bool is_start, bool with_generators,
            std::source_location where);
};

}  // namespace lockstep::nn
