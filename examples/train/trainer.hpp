#pragma once

#include <lockstep/group.hpp>
#include <memory>
#include <vector>

#include "train/data.hpp"
#include "train/options.hpp"
#include "train/report.hpp"

namespace train {

/// One rank's part of a training.
class Trainer {
 public:
  /// Builds the network and loads the checkpoint, if any: no rank waits for another here.
  /// The data must outlive the Trainer. Throws std::runtime_error, std::invalid_argument.
  Trainer(const Options& options, const Dataset& data);
  ~Trainer();

  /// Trains over the ranks of `group`, and tells its rank 0's terminal and files. Collective.
  /// Returns the whole epochs, the same on all ranks but for the speed.
  std::vector<EpochResult> run(const lockstep::Group& group);

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace train
