#pragma once

#include <chrono>
#include <cstddef>
#include <fstream>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "train/options.hpp"
#include "train/progress.hpp"

namespace train {

struct EpochResult {
  std::size_t step = 0;      ///< number of the last step, since the first epoch
  double loss = 0;           ///< mean over all ranks' samples
  double test_accuracy = 0;  ///< 0 .. 1, computed with the running statistics
  double seconds = 0;        ///< training time, without the test
  double images_per_second = 0;
};

/// The output of one rank: a progress bar or one line per epoch on standard output, and the metrics
/// file.
class Report {
 public:
  /// Throws std::system_error if the metrics file cannot be opened.
  Report(const Options& options, std::size_t steps_per_epoch, std::size_t first_step);

  /// loss: mean over the batch. This and the next two functions throw std::system_error if metrics
  /// cannot be written.
  void after_step(std::size_t step, double loss);
  void after_epoch(const EpochResult& result);
  void summary(const std::vector<EpochResult>& epochs, std::uint64_t seed,
               const std::vector<std::size_t>& shares);

 private:
  void write(const nlohmann::ordered_json& line);

  Options options_;
  std::size_t steps_per_epoch_;
  std::size_t n_steps_;
  std::size_t first_step_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  ProgressBar bar_{stdout};
  std::ofstream metrics_;
  double loss_sum_ = 0;  // over the steps since the last line of metrics
  std::size_t n_losses_ = 0;
  double shown_loss_ = 0;
};

}  // namespace train
