#include "train/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <system_error>

namespace train {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kSmoothing = 0.05;  // weight of a step in the loss of the progress bar

}  // namespace

Report::Report(const Options& options, std::size_t steps_per_epoch, std::size_t first_step)
    : options_(options),
      steps_per_epoch_(steps_per_epoch),
      n_steps_(options.epochs * steps_per_epoch),
      first_step_(first_step) {
  if (options_.max_steps > 0) n_steps_ = std::min(n_steps_, options_.max_steps);
  if (options_.metrics.empty()) return;
  metrics_.open(options_.metrics, std::ios::app);
  if (!metrics_) {
    throw std::system_error(errno, std::generic_category(),
                            "cannot open " + options_.metrics.string());
  }
}

void Report::write(const Json& line) {
  if (!metrics_.is_open()) return;
  metrics_ << line.dump() << std::endl;  // flushed for readers that follow the file
  if (!metrics_) {
    throw std::system_error(errno, std::generic_category(),
                            "cannot write " + options_.metrics.string());
  }
}

void Report::after_step(std::size_t step, double loss) {
  shown_loss_ = step == first_step_ + 1 ? loss : shown_loss_ + kSmoothing * (loss - shown_loss_);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
  const double seconds_per_step = elapsed.count() / static_cast<double>(step - first_step_);
  bar_.update({.epoch = (step - 1) / steps_per_epoch_ + 1,
               .n_epochs = options_.epochs,
               .step = (step - 1) % steps_per_epoch_ + 1,
               .n_steps = steps_per_epoch_,
               .loss = shown_loss_,
               .images_per_second = static_cast<double>(options_.batch) / seconds_per_step,
               .seconds_left = seconds_per_step * static_cast<double>(n_steps_ - step)});
  loss_sum_ += loss;
  ++n_losses_;
  if (options_.metrics_every == 0 || step % options_.metrics_every != 0) return;
  write({{"event", "steps"}, {"step", step}, {"loss", loss_sum_ / static_cast<double>(n_losses_)}});
  loss_sum_ = 0;
  n_losses_ = 0;
}

void Report::after_epoch(const EpochResult& result) {
  const std::size_t epoch = (result.step - 1) / steps_per_epoch_ + 1;
  bar_.clear();
  fmt::print("epoch {:>{}}/{}  loss {:.6f}  test accuracy {:5.2f} %  {:.0f} images/s\n", epoch,
             std::to_string(options_.epochs).size(), options_.epochs, result.loss,
             100 * result.test_accuracy, result.images_per_second);
  std::fflush(stdout);
  write({{"event", "epoch"},
         {"epoch", epoch},
         {"step", result.step},
         {"loss", result.loss},
         {"test_accuracy", result.test_accuracy},
         {"seconds", result.seconds},
         {"images_per_second", result.images_per_second}});
}

void Report::summary(const std::vector<EpochResult>& epochs, std::uint64_t seed,
                     const std::vector<std::size_t>& shares) {
  double seconds = 0;
  for (const EpochResult& epoch : epochs) seconds += epoch.seconds;
  const EpochResult& last = epochs.back();
  const auto n_images = static_cast<double>((last.step - first_step_) * options_.batch);
  write({{"event", "summary"},
         {"model", name_of(options_.model)},
         {"precision", name_of(options_.precision)},
         {"ranks", shares.size()},
         {"sync_bn", options_.sync_bn},
         {"batch", options_.batch},
         {"shares", shares},
         {"seed", seed},
         {"steps", last.step},
         {"loss", last.loss},
         {"test_accuracy", last.test_accuracy},
         {"seconds", seconds},
         {"images_per_second", n_images / seconds}});
}

}  // namespace train
