#pragma once

#include <lockstep/group.hpp>
#include <memory>
#include <vector>

#include "train/data.hpp"
#include "train/options.hpp"
#include "train/report.hpp"

namespace train {

/// One rank of a training run.
class Trainer {
 public:
  /// Builds the network and loads the checkpoint, if any. Not collective.
  /// The data must outlive the Trainer. Throws std::runtime_error, std::invalid_argument.
  Trainer(const Options& options, const Dataset& data);
  ~Trainer();

  /// Trains over the ranks of `group`; rank 0 writes the terminal output and files. Collective.
  /// Returns the completed epochs, the same on all ranks except for the speed.
  std::vector<EpochResult> run(const lockstep::Group& group);

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace train
