#include "train.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <lockstep/dist.hpp>
#include <lockstep/nn.hpp>
#include <lockstep/nn/elastic.hpp>
#include <lockstep/objects.hpp>
#include <lockstep/trace.hpp>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

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
  explicit Training(const Options& options)
      : network(make_model(options.model, kClasses, dtype_of(options), options.seed)),
        optimizer(network->parameters(),
                  torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(5e-4)),
        seed(options.seed),
        batch(options.batch) {}

  torch::nn::Sequential network;
  torch::optim::SGD optimizer;
  std::uint64_t seed;
  std::size_t batch;
  double epoch_loss_sum = 0;   ///< over the images of this epoch so far
  double recent_loss_sum = 0;  ///< since the last line of --metrics-every
  std::size_t n_recent_steps = 0;
};

/// The network, replicated within one rank; a single replica is the network itself.
struct ReplicatedImpl : torch::nn::Module {
  ReplicatedImpl(const torch::nn::Sequential& network, std::size_t n_replicas)
      : replicas(register_module("network", network),
                 std::vector<torch::Device>(n_replicas, torch::kCPU)) {}
  Tensor forward(const Tensor& input) { return replicas(input); }

  lockstep::nn::DataParallelWithCallback<torch::nn::Sequential> replicas;
};
TORCH_MODULE(Replicated);

/// Forward and backward of this rank's images: returns the sum of the losses of all ranks.
using Step = std::function<double(const Tensor& images, const Tensor& labels)>;

Tensor summed_loss(const Tensor& scores, const Tensor& labels) {
  return torch::cross_entropy_loss(scores, labels, /*weight=*/{}, at::Reduction::Sum);
}

Step step_in_shards(const torch::nn::Sequential& network, const Options& options,
                    const Group& group) {
  using Sharded = lockstep::nn::DistributedDataParallel<torch::nn::Sequential>;
  return
      [sharded = std::make_shared<Sharded>(
           network,
           lockstep::nn::DistributedDataParallelOptions{
               .group = group, .shards = options.shards, .shard_threads = at::get_num_threads()}),
       n = static_cast<double>(options.batch)](const Tensor& images, const Tensor& labels) {
        return n * sharded->run_shards(std::pair(images, labels),
                                       [](torch::nn::Sequential& mine, const auto& part) {
                                         return summed_loss(mine->forward(part.first), part.second);
                                       });
      };
}

Step step_of_ranks(const torch::nn::Sequential& network, const Options& options,
                   const Group& group) {
  using Network = lockstep::nn::DistributedDataParallel<Replicated>;
  const auto ddp =
      std::make_shared<Network>(Replicated(network, options.data_parallel),
                                lockstep::nn::DistributedDataParallelOptions{.group = group});
  return [ddp, group, n = static_cast<double>(options.batch)](const Tensor& images,
                                                              const Tensor& labels) {
    Tensor loss_sum;
    {
      const lockstep::TraceScope scope("forward");
      loss_sum = summed_loss((*ddp)(images), labels);
    }
    {
      const lockstep::TraceScope scope("backward");
      // DDP averages the gradients. With this scale the average is the gradient of the mean over
      // the whole batch, also if the ranks' parts differ: sum of (loss_sum * ranks / batch) /
      // ranks.
      (loss_sum * (static_cast<double>(group.size()) / n)).backward();
    }
    return lockstep::all_reduce_value(loss_sum.item<double>(), lockstep::ReduceOp::sum, group);
  };
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

std::size_t checked_batch(const Options& options, std::size_t n_images) {
  if (options.batch <= n_images) return options.batch;
  throw std::invalid_argument(fmt::format("--batch {}: expected at most the {} images of {}",
                                          options.batch, n_images, options.data));
}

/// A training over the ranks that there are at the time.
class Trainer {
 public:
  Trainer(const Options& options, const Dataset& data)
      : options_(options),
        n_images_(data.train.size()),
        // Images that do not fill a batch are left out, other ones in each epoch.
        sampler_(n_images_, {.global_batch = checked_batch(options, n_images_),
                             .seed = options.seed,
                             .drop_last = true,
                             .shards = options.shards}),
        steps_per_epoch_(sampler_.steps_per_epoch()),
        n_steps_(options.epochs * steps_per_epoch_),
        training_(options),
        train_samples_(data.train, data.train, dtype_of(options)),
        test_samples_(data.test, data.train, dtype_of(options)),
        is_load_there_(std::filesystem::is_regular_file(options.load)),
        state_({training_.network, training_.optimizer, training_.seed, training_.batch,
                training_.epoch_loss_sum, training_.recent_loss_sum, training_.n_recent_steps},
               {.save = options.save}) {
    if (options.max_steps > 0) n_steps_ = std::min(n_steps_, options.max_steps);
  }

  std::vector<EpochResult> run() {
    // Called anew after each loss and for each replacement, with the same state on all ranks.
    lockstep::nn::run_elastic(state_, [this] { train(); }, {.backend = options_.backend});
    if (report_ && !epochs_.empty()) report_->summary(epochs_, lockstep::get_world_size());
    return epochs_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::size_t step() const { return static_cast<std::size_t>(state_.step()); }

  void train() {
    const Group group = lockstep::default_group();
    // A replacement does not know that the training has begun.
    const bool is_first =
        lockstep::all_reduce_value(has_begun_ ? 1 : 0, lockstep::ReduceOp::max, group) == 0;
    if (is_first) resume(group);
    has_begun_ = true;
    if (group.rank() == 0 && !report_) report_.emplace(options_, steps_per_epoch_);
    if (report_ && !is_first) report_->new_generation(step(), group.size());
    if (is_first && step() >= n_steps_) return;  // that of an earlier start was complete
    if (options_.sync_bn) lockstep::nn::convert_sync_batchnorm(training_.network);
    if (!timed_) timed_ = {.from_step = step(), .since = Clock::now()};
    const Step run_step = options_.shards > 0 ? step_in_shards(training_.network, options_, group)
                                              : step_of_ranks(training_.network, options_, group);
    for (const std::size_t epoch : state_.epochs(sampler_, options_.epochs)) {
      training_.network->train();
      for (const std::int64_t each : sampler_.steps(state_)) {
        if (step() == n_steps_) break;
        train_step(run_step, each, group);
      }
      end_epoch(epoch, group);
      if (step() == n_steps_) return;  // --max-steps may end it within an epoch
    }
  }

  /// Before the first step: checks the checkpoint of --save, which run_elastic has read if it is
  /// there, or reads that of --load.
  void resume(const Group& group) {
    if (options_.batch < static_cast<std::size_t>(group.size())) {
      throw std::invalid_argument(
          fmt::format("--batch {}: expected at least one image for each of {} ranks",
                      options_.batch, group.size()));
    }
    if (options_.shards > 0 && (!options_.sync_bn || options_.data_parallel > 1)) {
      throw std::invalid_argument(
          fmt::format("--shards {}: without --sync-bn off and --data-parallel", options_.shards));
    }
    const bool is_saved = step() > 0;
    if (is_saved && options_.n_restarts == 0 && options_.load != options_.save) {
      // After a restart it would be taken for the checkpoint of this training.
      throw std::invalid_argument(
          fmt::format("--save {0}: this file already exists; resume from it with --load {0}, or "
                      "remove it to start again",
                      options_.save));
    }
    if (!is_saved && !options_.load.empty()) {
      bool is_there = is_load_there_ || options_.load != options_.save;
      lockstep::broadcast_object(is_there, /*src=*/0, group);  // other hosts do not have the file
      if (!is_there) throw std::invalid_argument(options_.load + ": No such file or directory");
      state_.load(options_.load);
    }
    const std::string& path = is_saved ? options_.save : options_.load;
    if (path.empty()) return;
    if (step() >= n_steps_ && options_.n_restarts == 0) {
      throw std::invalid_argument(
          fmt::format("cannot resume from {}: it has done {} steps, and --epochs and --max-steps "
                      "ask for {}; give more",
                      path, step(), n_steps_));
    }
    if (training_.batch != options_.batch || training_.seed != options_.seed) {
      throw std::invalid_argument(
          fmt::format("cannot resume from {}: it was trained with --batch {} --seed {}, got "
                      "--batch {} --seed {}; give the same",
                      path, training_.batch, training_.seed, options_.batch, options_.seed));
    }
  }

  void train_step(const Step& run_step, std::int64_t step, const Group& group) {
    const auto drawn = sampler_.batch(step, group);
    const auto indices = torch::tensor(std::vector<std::int64_t>(drawn.begin(), drawn.end()));
    training_.optimizer.zero_grad();
    const double sum = run_step(train_samples_.images.index_select(0, indices),
                                train_samples_.labels.index_select(0, indices));
    const auto batch = static_cast<double>(options_.batch);
    training_.epoch_loss_sum += sum;
    training_.recent_loss_sum += sum / batch;
    ++training_.n_recent_steps;
    report_step(static_cast<std::size_t>(step) + 1, sum / batch);
    state_.step_done({training_.optimizer});
  }

  /// n_steps: with this one.
  void report_step(std::size_t n_steps, double loss) {
    if (report_) report_->after_step(n_steps, loss);
    if (options_.metrics_every == 0 || n_steps % options_.metrics_every != 0) return;
    const double mean = training_.recent_loss_sum / static_cast<double>(training_.n_recent_steps);
    if (report_) report_->mean_loss(n_steps, mean);
    training_.recent_loss_sum = 0;
    training_.n_recent_steps = 0;
  }

  void end_epoch(std::size_t epoch, const Group& group) {
    const std::chrono::duration<double> elapsed = Clock::now() - timed_->since;
    const auto images_since = [&](std::size_t from) {
      return static_cast<double>((step() - from) * options_.batch);
    };
    const EpochResult result{
        .step = step(),
        .loss = training_.epoch_loss_sum / images_since(epoch * steps_per_epoch_),
        .test_accuracy = test(training_.network, test_samples_, group),
        .seconds = elapsed.count(),
        .images_per_second = images_since(timed_->from_step) / elapsed.count()};
    epochs_.push_back(result);
    if (report_) report_->after_epoch(result);
    if (step() % steps_per_epoch_ == 0) training_.epoch_loss_sum = 0;  // --max-steps may end before
    timed_ = {.from_step = step(), .since = Clock::now()};
  }

  struct Timed {
    std::size_t from_step;
    Clock::time_point since;
  };

  const Options options_;
  const std::size_t n_images_;
  const lockstep::nn::ElasticSampler sampler_;
  const std::size_t steps_per_epoch_;
  std::size_t n_steps_;
  Training training_;
  const Samples train_samples_, test_samples_;
  const bool is_load_there_;  ///< before rank 0 has written the file of --save
  lockstep::nn::ElasticState state_;
  bool has_begun_ = false;
  std::vector<EpochResult> epochs_;
  std::optional<Report> report_;  ///< of rank 0
  std::optional<Timed> timed_;
};

}  // namespace

std::vector<EpochResult> run(const Options& options, const Dataset& data) {
  if (options.threads > 0 || options.shards > 0) at::set_num_threads(std::max(options.threads, 1));
  return Trainer(options, data).run();
}

namespace {

/// The parameters and buffers in a checkpoint.
torch::OrderedDict<std::string, Tensor> tensors_of(const Options& options,
                                                   const std::string& path) {
  Training training(options);
  lockstep::nn::load_training(
      path,
      {training.network, training.optimizer, training.seed, training.batch, training.epoch_loss_sum,
       training.recent_loss_sum, training.n_recent_steps},
      Group());
  auto tensors = training.network->named_parameters();
  for (const auto& buffer : training.network->named_buffers()) {
    tensors.insert(buffer.key(), buffer.value());
  }
  return tensors;
}

}  // namespace

std::string dump(const Options& options, const std::string& path) {
  std::string bytes;
  for (const auto& item : tensors_of(options, path)) {
    const Tensor whole = item.value().detach().contiguous();
    bytes.append(static_cast<const char*>(whole.data_ptr()), whole.nbytes());
  }
  return bytes;
}

Difference compare(const Options& options, const std::string& a, const std::string& b) {
  const torch::NoGradGuard no_grad;
  const auto others = tensors_of(options, b);
  Difference difference;
  for (const auto& item : tensors_of(options, a)) {
    const auto other = others[item.key()].to(torch::kFloat64);
    const double largest = (item.value().to(torch::kFloat64) - other).abs().max().item<double>();
    if (largest >= difference.largest || std::isnan(largest)) difference = {largest, item.key()};
    if (std::isnan(largest)) break;
  }
  return difference;
}

}  // namespace train
