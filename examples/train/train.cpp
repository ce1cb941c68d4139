#include "train.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <lockstep/dist.hpp>
#include <lockstep/nn.hpp>
#include <lockstep/nn/elastic.hpp>
#include <lockstep/objects.hpp>
#include <lockstep/trace.hpp>
#include <optional>
#include <stdexcept>

#include "models.hpp"
#include "report.hpp"

namespace train {
namespace {

using lockstep::Group;
using torch::Tensor;

torch::Dtype dtype_of(const Options& options) {
  return options.precision == "f64" ? torch::kFloat64 : torch::kFloat32;
}

Tensor tensor_of(const std::vector<std::uint8_t>& bytes) {
  const auto n = static_cast<std::int64_t>(bytes.size());
  return torch::from_blob(const_cast<std::uint8_t*>(bytes.data()), n, torch::kUInt8);
}

/// A data set as the network's input.
struct Samples {
  /// Normalises with the mean and standard deviation of `scaled_by`.
  Samples(const Images& from, const Images& scaled_by, torch::Dtype dtype) {
    const auto scale = tensor_of(scaled_by.pixels).to(torch::kFloat64);
    const double mean = scale.mean().item<double>();
    const double variance = scale.square().mean().item<double>() - mean * mean;
    images = tensor_of(from.pixels).to(dtype);
    images.sub_(mean).div_(variance > 0 ? std::sqrt(variance) : 1.0);
    labels = tensor_of(from.labels).to(torch::kInt64);
    images = images.view({labels.numel(), 1, static_cast<std::int64_t>(from.height), -1});
  }

  Tensor images;  ///< (n, 1, height, width)
  Tensor labels;  ///< (n), int64
};

/// The state of a training.
struct Training {
  Training(const Options& options, const Dataset& data)
      : network(make_model(options.model, kClasses, dtype_of(options), options.seed)),
        optimizer(network->parameters(),
                  torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(5e-4)),
        // That of one rank: every rank draws the whole batch and takes its part, of whatever size.
        sampler(data.train.size(), {.seed = options.seed, .group = Group()}),
        seed(options.seed),
        batch(options.batch) {}

  void save(const std::string& path, const Group& group) {
    lockstep::nn::save_training(
        path, {network, optimizer, sampler, seed, batch, step, epoch_loss_sum}, group);
  }
  void load(const std::string& path, const Group& group) {
    lockstep::nn::load_training(
        path, {network, optimizer, sampler, seed, batch, step, epoch_loss_sum}, group);
  }

  torch::nn::Sequential network;
  torch::optim::SGD optimizer;
  lockstep::nn::DistributedSampler sampler;
  std::uint64_t seed;
  std::size_t batch;
  std::size_t step = 0;       ///< steps done since the first epoch
  double epoch_loss_sum = 0;  ///< over the images of this epoch so far
  // Since the last line of --metrics-every; not in a checkpoint.
  double recent_loss_sum = 0;
  std::size_t n_recent_steps = 0;
};

/// Resumes from the checkpoint of --load, or after a restart from that of --save, if there is one.
void resume(Training& training, const Options& options, std::size_t n_steps, const Group& group) {
  bool is_saved = std::filesystem::is_regular_file(options.save);
  lockstep::broadcast_object(is_saved, /*src=*/0, group);  // other hosts do not have the file
  if (is_saved && options.n_restarts == 0 && options.load != options.save) {
    // After a restart it would be taken for the checkpoint of this training.
    throw std::invalid_argument(
        fmt::format("--save {0}: this file already exists; resume from it with --load {0}, or "
                    "remove it to start again",
                    options.save));
  }
  const std::string& path = is_saved ? options.save : options.load;
  if (path.empty()) return;
  training.load(path, group);
  if (training.step >= n_steps && options.n_restarts == 0) {
    throw std::invalid_argument(
        fmt::format("cannot resume from {}: it has done {} steps, and --epochs and --max-steps ask "
                    "for {}; give more",
                    path, training.step, n_steps));
  }
  if (training.batch != options.batch || training.seed != options.seed) {
    throw std::invalid_argument(
        fmt::format("cannot resume from {}: it was trained with --batch {} --seed {}, got --batch "
                    "{} --seed {}; "
                    "give the same",
                    path, training.batch, training.seed, options.batch, options.seed));
  }
}

/// The network, replicated within one rank; a single replica is the network itself.
struct ReplicatedImpl : torch::nn::Module {
  ReplicatedImpl(const torch::nn::Sequential& network, std::size_t n_replicas)
      : replicas(register_module("network", network),
                 std::vector<torch::Device>(n_replicas, torch::kCPU)) {}
  Tensor forward(const Tensor& input) { return replicas(input); }

  lockstep::nn::DataParallelWithCallback<torch::nn::Sequential> replicas;
};
TORCH_MODULE(Replicated);
using Network = lockstep::nn::DistributedDataParallel<Replicated>;

/// One step; returns the mean of the loss over the whole batch.
double train_step(Network& network, Training& training, const Samples& samples,
                  const Group& group) {
  const auto drawn = training.sampler.next(training.batch).value();
  const auto indices = torch::tensor(std::vector<std::int64_t>(drawn.begin(), drawn.end()))
                           .tensor_split(group.size())
                           .at(static_cast<std::size_t>(group.rank()));
  training.optimizer.zero_grad();
  Tensor loss_sum;
  {
    const lockstep::TraceScope scope("forward");
    const auto scores = network(samples.images.index_select(0, indices));
    loss_sum = torch::cross_entropy_loss(scores, samples.labels.index_select(0, indices),
                                         /*weight=*/{}, at::Reduction::Sum);
  }
  const auto batch = static_cast<double>(training.batch);
  {
    const lockstep::TraceScope scope("backward");
    // DDP averages the gradients. With this scale the average is the gradient of the mean over the
    // whole batch, also if the ranks' parts differ: sum of (loss_sum * ranks / batch) / ranks.
    (loss_sum * (static_cast<double>(group.size()) / batch)).backward();
  }
  // From here on the step can be completed without the other ranks.
  const double sum =
      lockstep::all_reduce_value(loss_sum.item<double>(), lockstep::ReduceOp::sum, group);
  training.optimizer.step();
  ++training.step;
  training.epoch_loss_sum += sum;
  training.recent_loss_sum += sum / batch;
  ++training.n_recent_steps;
  return sum / batch;
}

/// The accuracy (0 .. 1); each rank tests a part of the samples.
double test(torch::nn::Sequential& network, const Samples& samples, const Group& group) {
  constexpr std::int64_t kBatch = 256;
  const torch::NoGradGuard no_grad;
  network->eval();
  // Without SyncBatchNorm the running statistics differ: those of rank 0 count, as they are saved.
  for (Tensor& buffer : network->buffers()) lockstep::nn::broadcast(buffer, /*src=*/0, group);
  std::int64_t n_right = 0;
  const auto rank = static_cast<std::size_t>(group.rank());
  for (const Tensor& indices :
       torch::arange(samples.labels.numel()).tensor_split(group.size()).at(rank).split(kBatch)) {
    const auto scores = network->forward(samples.images.index_select(0, indices));
    const auto labels = samples.labels.index_select(0, indices);
    n_right += scores.argmax(1).eq(labels).sum().item<std::int64_t>();
  }
  n_right = lockstep::all_reduce_value(n_right, lockstep::ReduceOp::sum, group);
  return static_cast<double>(n_right) / static_cast<double>(samples.labels.numel());
}

/// A training over the ranks that there are at the time.
class Trainer {
 public:
  Trainer(const Options& options, const Dataset& data)
      : options_(options),
        n_images_(data.train.size()),
        // Images that do not fill a batch are left out, other ones in each epoch.
        steps_per_epoch_(n_images_ / options.batch),
        n_steps_(options.epochs * steps_per_epoch_),
        training_(options, data),
        train_samples_(data.train, data.train, dtype_of(options)),
        test_samples_(data.test, data.train, dtype_of(options)),
        state_({training_.network, training_.optimizer, training_.sampler, training_.step,
                training_.epoch_loss_sum, training_.recent_loss_sum, training_.n_recent_steps}) {
    if (options.max_steps > 0) n_steps_ = std::min(n_steps_, options.max_steps);
  }

  std::vector<EpochResult> run() {
    // Called anew after each loss and for each replacement, with the same state on all ranks.
    const auto train = [this] {
      const Group group = lockstep::default_group();
      begin(group);
      Network network(Replicated(training_.network, options_.data_parallel), {.group = group});
      finish_epoch(group);  // if a loss has interrupted that
      while (training_.step < n_steps_) {
        train_epoch(network, group);
        finish_epoch(group);
      }
    };
    lockstep::nn::run_elastic(state_, train, {.backend = options_.backend});
    if (report_ && !epochs_.empty()) report_->summary(epochs_, lockstep::get_world_size());
    return epochs_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  void begin(const Group& group) {
    if (options_.batch < static_cast<std::size_t>(group.size()) || options_.batch > n_images_) {
      throw std::invalid_argument(
          fmt::format("--batch {}: expected at least one image for each of {} ranks, and at most "
                      "the {} images of {}",
                      options_.batch, group.size(), n_images_, options_.data));
    }
    // A replacement does not know where the training is.
    reported_step_ = lockstep::all_reduce_value(reported_step_, lockstep::ReduceOp::max, group);
    const bool has_begun = reported_step_ >= 0;
    if (!has_begun) {
      resume(training_, options_, n_steps_, group);
      state_.set_step(static_cast<std::int64_t>(training_.step));
      reported_step_ = state_.step();
    }
    if (group.rank() == 0 && !report_) report_.emplace(options_, steps_per_epoch_);
    if (report_ && has_begun) report_->new_generation(training_.step, group.size());
    // At once, so that a path that cannot be written is an error before the first step; and in each
    // generation, because the end of the one before may have interrupted it.
    if (!options_.save.empty()) training_.save(options_.save, group);
    if (options_.sync_bn) {
      lockstep::nn::revert_sync_batchnorm(training_.network);  // of the generation before
      lockstep::nn::convert_sync_batchnorm(training_.network, group);
    }
    if (!timed_) timed_ = {.from_step = training_.step, .since = Clock::now()};
  }

  /// What is left of an epoch.
  void train_epoch(Network& network, const Group& group) {
    if (training_.step % steps_per_epoch_ == 0) training_.epoch_loss_sum = 0;
    training_.sampler.set_epoch(training_.step / steps_per_epoch_);
    training_.sampler.reset();
    training_.network->train();
    do {
      const double loss = train_step(network, training_, train_samples_, group);
      report_step(loss);
      state_.step_done();
    } while (!is_epoch_over());
  }

  void report_step(double loss) {
    if (report_) report_->after_step(training_.step, loss);
    if (options_.metrics_every == 0 || training_.step % options_.metrics_every != 0) return;
    const double mean = training_.recent_loss_sum / static_cast<double>(training_.n_recent_steps);
    if (report_) report_->mean_loss(training_.step, mean);
    training_.recent_loss_sum = 0;
    training_.n_recent_steps = 0;
  }

  /// Tests and saves at the end of an epoch.
  void finish_epoch(const Group& group) {
    if (!is_epoch_over() || reported_step_ == state_.step()) return;
    const std::chrono::duration<double> elapsed = Clock::now() - timed_->since;
    const auto images_since = [&](std::size_t step) {
      return static_cast<double>((training_.step - step) * options_.batch);
    };
    const std::size_t epoch = (training_.step - 1) / steps_per_epoch_;
    epochs_.push_back({.step = training_.step,
                       .loss = training_.epoch_loss_sum / images_since(epoch * steps_per_epoch_),
                       .test_accuracy = test(training_.network, test_samples_, group),
                       .seconds = elapsed.count(),
                       .images_per_second = images_since(timed_->from_step) / elapsed.count()});
    reported_step_ = state_.step();
    if (report_) report_->after_epoch(epochs_.back());
    if (!options_.save.empty()) training_.save(options_.save, group);
    timed_ = {.from_step = training_.step, .since = Clock::now()};
  }

  bool is_epoch_over() const {
    return training_.step % steps_per_epoch_ == 0 || training_.step == n_steps_;
  }

  struct Timed {
    std::size_t from_step;
    Clock::time_point since;
  };

  const Options options_;
  const std::size_t n_images_, steps_per_epoch_;
  std::size_t n_steps_;
  Training training_;
  const Samples train_samples_, test_samples_;
  lockstep::nn::ElasticState state_;
  std::int64_t reported_step_ = -1;  ///< -1: the training has not begun
  std::vector<EpochResult> epochs_;
  std::optional<Report> report_;  ///< of rank 0
  std::optional<Timed> timed_;
};

}  // namespace

std::vector<EpochResult> run(const Options& options, const Dataset& data) {
  if (options.threads > 0) at::set_num_threads(options.threads);
  return Trainer(options, data).run();
}

Difference compare(const Options& options, const Dataset& data, const std::string& a,
                   const std::string& b) {
  const auto tensors_of = [&](const std::string& path) {
    Training training(options, data);
    training.load(path, Group());
    auto tensors = training.network->named_parameters();
    for (const auto& buffer : training.network->named_buffers()) {
      tensors.insert(buffer.key(), buffer.value());
    }
    return tensors;
  };
  const torch::NoGradGuard no_grad;
  const auto others = tensors_of(b);
  Difference difference;
  for (const auto& item : tensors_of(a)) {
    const auto other = others[item.key()].to(torch::kFloat64);
    const double largest = (item.value().to(torch::kFloat64) - other).abs().max().item<double>();
    if (largest >= difference.largest || std::isnan(largest)) difference = {largest, item.key()};
    if (std::isnan(largest)) break;
  }
  return difference;
}

}  // namespace train
