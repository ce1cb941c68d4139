#include "train.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <lockstep/dist.hpp>
#include <lockstep/nn.hpp>
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

/// All that a checkpoint holds.
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
};

/// Resumes from the checkpoint of --load, or after a restart from that of --save, if there is one.
void resume(Training& training, const Options& options, std::size_t n_steps, const Group& group) {
  std::string path = options.load;
  if (group.rank() == 0 && std::filesystem::is_regular_file(options.save)) {
    if (options.n_restarts == 0 && options.load != options.save) {
      // After a restart it would be taken for the checkpoint of this training.
      throw std::invalid_argument(
          fmt::format("--save {0}: this file already exists; resume from it with --load {0}, or "
                      "remove it to start again",
                      options.save));
    }
    path = options.save;
  }
  lockstep::broadcast_object(path, /*src=*/0, group);  // other hosts do not have the file
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

/// One step; returns the sum of the loss over the whole batch.
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
  {
    const lockstep::TraceScope scope("backward");
    // DDP averages the gradients. With this scale the average is the gradient of the mean over the
    // whole batch, also if the ranks' parts differ: sum of (loss_sum * ranks / batch) / ranks.
    (loss_sum * (static_cast<double>(group.size()) / static_cast<double>(training.batch)))
        .backward();
  }
  training.optimizer.step();
  ++training.step;
  return lockstep::all_reduce_value(loss_sum.item<double>(), lockstep::ReduceOp::sum, group);
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

}  // namespace

std::vector<EpochResult> run(const Options& options, const Dataset& data, const Group& group) {
  using Clock = std::chrono::steady_clock;
  const auto n_ranks = static_cast<std::size_t>(group.size());
  if (options.batch < n_ranks || options.batch > data.train.size()) {
    throw std::invalid_argument(
        fmt::format("--batch {}: expected at least one image for each of {} ranks, and at most the "
                    "{} images of {}",
                    options.batch, n_ranks, data.train.size(), options.data));
  }
  // Images that do not fill a batch are left out, other ones in each epoch.
  const std::size_t steps_per_epoch = data.train.size() / options.batch;
  std::size_t n_steps = options.epochs * steps_per_epoch;
  if (options.max_steps > 0) n_steps = std::min(n_steps, options.max_steps);
  if (options.threads > 0) at::set_num_threads(options.threads);

  Training training(options, data);
  resume(training, options, n_steps, group);
  std::optional<Report> report;
  if (group.rank() == 0) report.emplace(options, steps_per_epoch);
  // At once, so that a path that cannot be written is an error before the first step.
  if (!options.save.empty()) training.save(options.save, group);

  const Samples train_samples(data.train, data.train, dtype_of(options));
  const Samples test_samples(data.test, data.train, dtype_of(options));
  if (options.sync_bn) lockstep::nn::convert_sync_batchnorm(training.network, group);
  Network network(Replicated(training.network, options.data_parallel), {.group = group});

  std::vector<EpochResult> epochs;
  while (training.step < n_steps) {
    const std::size_t first_step = training.step;
    const std::size_t epoch = first_step / steps_per_epoch;
    const auto start = Clock::now();
    training.sampler.set_epoch(epoch);
    training.sampler.reset();
    training.network->train();
    do {
      const double loss_sum = train_step(network, training, train_samples, group);
      training.epoch_loss_sum += loss_sum;
      if (report) report->after_step(training.step, loss_sum / static_cast<double>(options.batch));
    } while (training.step % steps_per_epoch != 0 && training.step < n_steps);

    const std::chrono::duration<double> elapsed = Clock::now() - start;
    const auto images_since = [&](std::size_t step) {
      return static_cast<double>((training.step - step) * options.batch);
    };
    epochs.push_back({.step = training.step,
                      .loss = training.epoch_loss_sum / images_since(epoch * steps_per_epoch),
                      .test_accuracy = test(training.network, test_samples, group),
                      .seconds = elapsed.count(),
                      .images_per_second = images_since(first_step) / elapsed.count()});
    if (training.step % steps_per_epoch == 0) training.epoch_loss_sum = 0;
    if (report) report->after_epoch(epochs.back());
    if (!options.save.empty()) training.save(options.save, group);
  }
  if (report && !epochs.empty()) report->summary(epochs, group.size());
  return epochs;
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
