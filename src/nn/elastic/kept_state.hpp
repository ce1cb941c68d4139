#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <lockstep/nn/checkpoint.hpp>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace lockstep::nn {

/// The tensors and modules of parts, each once, in an order that is the same on all ranks.
struct PartTensors {
  std::vector<torch::nn::Module*> modules;  ///< a module before those in it
  std::vector<at::Tensor> parameters;       ///< of modules and of optimizers
  std::vector<at::Tensor> buffers;

  /// Reads them anew if a module has been exchanged, such as by convert_sync_batchnorm.
  void update(std::span<const TrainingPart> parts);
};

/// One kind of what a step reads: a row of the table in docs/design/021.
class KeptThing {
 public:
  KeptThing() = default;
  virtual ~KeptThing() = default;
  KeptThing(const KeptThing&) = delete;
  KeptThing& operator=(const KeptThing&) = delete;

  /// The present step begins with what is now.
  virtual void keep() = 0;
  /// Undoes what the present step has changed. Also several times after one keep().
  virtual void set_back() = 0;
  /// What the archive of the parts does not have; for a rank that lacks the newest state.
  virtual void save(torch::serialize::OutputArchive&) const {}
  virtual void load(torch::serialize::InputArchive&) {}
};

/// All that a step of a training reads: kept at the end of each step, sent to ranks that lack it,
/// and set back where a step is repeated.
class KeptState {
 public:
  /// snapshot: keep a copy of parameters and optimizers too.
  KeptState(std::vector<TrainingPart> parts, bool snapshot);
  ~KeptState();
  KeptState(const KeptState&) = delete;
  KeptState& operator=(const KeptState&) = delete;

  void keep();
  /// The part of keep() that have_parameters_changed() needs.
  void sample_parameters();
  void set_back();
  /// The present state beside the parts.
  void save(torch::serialize::OutputArchive& archive) const;
  /// with_generators: otherwise this rank keeps its own.
  void load(torch::serialize::InputArchive& archive, bool with_generators);
  /// Before a step, if the program asks for it.
  void seed_generators(std::uint64_t seed);
  /// The same on ranks that have drawn the same numbers before the present step.
  std::uint64_t hash_of_generators() const;

  /// Whether values of parameters have changed since keep(): see ParameterSamples.
  bool have_parameters_changed();
  /// A parameter, as text, with a gradient that would have changed it if its optimizer had used it,
  /// while no parameter has changed since keep(); empty if there is none.
  std::string unused_gradient();

  std::span<const TrainingPart> parts() const { return parts_; }

 private:
  struct Things;
  std::vector<TrainingPart> parts_;
  PartTensors tensors_;
  std::unique_ptr<Things> things_;
};

}  // namespace lockstep::nn
