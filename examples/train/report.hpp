#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "train.hpp"

namespace train {

/// "[####....]".
inline std::string progress_bar(std::size_t done, std::size_t all) {
  constexpr std::size_t kWidth = 40;
  const std::size_t filled = kWidth * done / all;
  return fmt::format("[{:#<{}}{:.<{}}]", "", filled, "", kWidth - filled);
}

/// What rank 0 writes: a line for each epoch, the progress within it if that is a terminal, and the
/// JSON lines of --metrics. Throws std::system_error if metrics cannot be written.
class Report {
 public:
  Report(const Options& options, std::size_t steps_per_epoch)
      : options_(options), steps_per_epoch_(steps_per_epoch) {
    if (!options.metrics.empty()) metrics_.open(options.metrics, std::ios::app);
    check("cannot open ");
  }

  /// loss: mean over the batch.
  void after_step(std::size_t step, double loss) {
    const std::string bar = progress_bar((step - 1) % steps_per_epoch_ + 1, steps_per_epoch_);
    if (is_on_terminal_ && bar != std::exchange(bar_, bar)) {
      fmt::print("\r{}  {}  loss {:.4f}\x1b[K", epoch_at(step), bar, loss);
      std::fflush(stdout);
    }
  }

  /// For --metrics-every. loss: mean over the steps since the line before.
  void mean_loss(std::size_t step, double loss) {
    write({{"event", "steps"}, {"step", step}, {"loss", loss}});
  }

  /// Ranks were lost, or have joined.
  void new_generation(std::size_t step, int n_ranks) {
    write({{"event", "generation"}, {"step", step}, {"ranks", n_ranks}});
  }

  void after_epoch(const EpochResult& result) {
    fmt::print("{}{}  loss {:.6f}  test accuracy {:5.2f} %  {:.0f} images/s\n",
               is_on_terminal_ ? "\r\x1b[K" : "", epoch_at(result.step), result.loss,
               100 * result.test_accuracy, result.images_per_second);
    std::fflush(stdout);
    write({{"event", "epoch"},
           {"epoch", (result.step - 1) / steps_per_epoch_ + 1},
           {"step", result.step},
           {"loss", result.loss},
           {"test_accuracy", result.test_accuracy},
           {"seconds", result.seconds},
           {"images_per_second", result.images_per_second}});
  }

  void summary(const std::vector<EpochResult>& epochs, int n_ranks) {
    double seconds = 0, n_images = 0;
    for (const EpochResult& epoch : epochs) {
      seconds += epoch.seconds;
      n_images += epoch.seconds * epoch.images_per_second;
    }
    write({{"event", "summary"},
           {"model", options_.model},
           {"ranks", n_ranks},
           {"sync_bn", options_.sync_bn},
           {"loss", epochs.back().loss},
           {"test_accuracy", epochs.back().test_accuracy},
           {"images_per_second", n_images / seconds}});
  }

 private:
  std::string epoch_at(std::size_t step) const {
    return fmt::format("epoch {:>{}}/{}", (step - 1) / steps_per_epoch_ + 1,
                       std::to_string(options_.epochs).size(), options_.epochs);
  }
  void write(const nlohmann::ordered_json& line) {
    if (!metrics_.is_open()) return;
    metrics_ << line.dump() << std::endl;  // flushed for readers that follow the file
    check("cannot write ");
  }
  void check(const char* what) const {
    if (metrics_) return;
    throw std::system_error(errno, std::generic_category(), what + options_.metrics);
  }

  Options options_;
  std::size_t steps_per_epoch_;
  std::ofstream metrics_;
  bool is_on_terminal_ = isatty(STDOUT_FILENO) == 1;
  std::string bar_;  ///< as it was drawn last
};

}  // namespace train
