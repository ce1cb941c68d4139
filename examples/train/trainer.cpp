#include "train/trainer.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <lockstep/dist.hpp>
#include <lockstep/nn.hpp>
#include <lockstep/trace.hpp>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>

#include "train/batches.hpp"
#include "train/checkpoint.hpp"
#include "train/models.hpp"
#include "train/report.hpp"
#include "train/samples.hpp"

namespace train {
namespace {

namespace F = torch::nn::functional;
using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kDefaultSeed = 1;
constexpr std::size_t kTestBatch = 256;

torch::Dtype dtype_of(Precision precision) {
  switch (precision) {
    case Precision::f32: return torch::kFloat32;
    case Precision::f64: return torch::kFloat64;
  }
  throw std::invalid_argument("no such precision");
}

torch::optim::SGDOptions sgd_options(const Options& options) {
  return torch::optim::SGDOptions(options.learning_rate)
      .momentum(options.momentum)
      .weight_decay(options.weight_decay);
}

/// Calls body() as a region in the trace of `lockstep run --trace`.
template <class Body>
auto traced(const char* name, Body body) {
  const lockstep::TraceScope scope(name);
  return body();
}

/// The network, replicated within one rank; a single replica is the network itself.
struct ReplicatedImpl : torch::nn::Module {
  ReplicatedImpl(const torch::nn::Sequential& network, std::size_t n_replicas)
      : replicas(register_module("network", network),
                 std::vector<torch::Device>(n_replicas, torch::kCPU)) {}
  torch::Tensor forward(const torch::Tensor& input) { return replicas(input); }

  lockstep::nn::DataParallelWithCallback<torch::nn::Sequential> replicas;
};
TORCH_MODULE(Replicated);

}  // namespace

class Trainer::State {
 public:
  State(const Options& options, const Dataset& data);
  std::vector<EpochResult> run(const lockstep::Group& group);

 private:
  using Network = lockstep::nn::DistributedDataParallel<Replicated>;

  /// Chooses the checkpoint to resume from: that of --load, or after a restart that of --save.
  void choose_checkpoint();
  void load();
  bool done() const;
  /// Throws std::runtime_error on all ranks if they are at different steps.
  void compare_positions(const lockstep::Group& group) const;
  EpochResult run_epoch(Network& network, std::span<const std::size_t> shares,
                        const lockstep::Group& group, std::optional<Report>& report);
  /// One step on this rank's part of the batch; returns the sum of the loss over the whole batch.
  double step(Network& network, std::span<const std::int64_t> part, const lockstep::Group& group);
  /// The accuracy (0 .. 1) on the test images; each rank tests a part of them.
  double test(const lockstep::Group& group);

  Options options_;
  bool resumes_ = false;  ///< after a restart, from the checkpoint of this run
  std::size_t n_train_;
  std::size_t n_test_;
  Samples train_;
  Samples test_;
  torch::nn::Sequential model_;
  torch::optim::SGD optimizer_;
  std::size_t steps_per_epoch_;
  Position at_;
};

Trainer::State::State(const Options& options, const Dataset& data)
    : options_(options),
      n_train_(data.train.size()),
      n_test_(data.test.size()),
      train_(data.train, data.train, dtype_of(options.precision)),
      test_(data.test, data.train, dtype_of(options.precision)),
      model_(make_model(options.model, data.train.channels, data.n_classes)),
      optimizer_((model_->to(dtype_of(options.precision)), model_->parameters()),
                 sgd_options(options)),
      // Samples that do not fill a batch are omitted; each epoch omits different ones.
      steps_per_epoch_(n_train_ / options.batch),
      at_{.model = name_of(options.model),
          .precision = name_of(options.precision),
          .seed = options.seed.value_or(kDefaultSeed),
          .batch = options.batch} {
  if (steps_per_epoch_ == 0) {
    throw std::invalid_argument(fmt::format("--batch {}: expected at most the {} images of {}",
                                            options_.batch, n_train_, options_.data.string()));
  }
  if (options_.threads > 0) at::set_num_threads(options_.threads);
  choose_checkpoint();
  if (options_.load.empty()) {
    initialise(*model_, at_.seed);
  } else {
    load();
  }
}

void Trainer::State::choose_checkpoint() {
  if (options_.save.empty() || !std::filesystem::is_regular_file(options_.save)) return;
  if (options_.n_restarts > 0) {
    options_.load = options_.save;
    resumes_ = true;
  } else if (options_.load != options_.save) {
    // A restart before the end of the first epoch would take it for the checkpoint of this run.
    throw std::invalid_argument(
        fmt::format("--save {}: this file already exists; resume from it with --load {}, or remove "
                    "it to start again",
                    options_.save.string(), options_.save.string()));
  }
}

void Trainer::State::load() {
  const Position loaded = load_checkpoint(options_.load, *model_, optimizer_, at_);
  const bool other_seed = options_.seed && *options_.seed != loaded.seed;
  if (loaded.batch != options_.batch || other_seed) {
    throw std::invalid_argument(
        fmt::format("cannot resume from {}: it was trained with --batch {} --seed {}, got --batch "
                    "{} --seed {}; give the same",
                    options_.load.string(), loaded.batch, loaded.seed, options_.batch, at_.seed));
  }
  at_ = loaded;
  if (done() && !resumes_) {
    throw std::invalid_argument(
        fmt::format("cannot resume from {}: it has done {} steps, all that --epochs and "
                    "--max-steps allow; give more",
                    options_.load.string(), at_.step));
  }
  // The checkpoint includes its learning rate; the command line overrides it.
  for (auto& parameters : optimizer_.param_groups()) {
    static_cast<torch::optim::SGDOptions&>(parameters.options()) = sgd_options(options_);
  }
}

bool Trainer::State::done() const {
  return at_.step >= options_.epochs * steps_per_epoch_ ||
         (options_.max_steps > 0 && at_.step >= options_.max_steps);
}

void Trainer::State::compare_positions(const lockstep::Group& group) const {
  const auto step = static_cast<std::int64_t>(at_.step);
  const auto first = lockstep::all_reduce_value(step, lockstep::ReduceOp::min, group);
  const auto last = lockstep::all_reduce_value(step, lockstep::ReduceOp::max, group);
  if (first == last) return;
  throw std::runtime_error(
      fmt::format("cannot resume: the ranks' checkpoints are at steps {} to {}, this rank's at {}; "
                  "give all hosts the same file",
                  first, last, step));
}

double Trainer::State::step(Network& network, std::span<const std::int64_t> part,
                            const lockstep::Group& group) {
  const auto batch = traced("batch", [&] { return train_.batch(part); });
  optimizer_.zero_grad();
  const auto loss_sum = traced("forward", [&] {
    return F::cross_entropy(network.forward(batch.input), batch.labels,
                            F::CrossEntropyFuncOptions().reduction(torch::kSum));
  });
  // DDP averages the gradients. With this scale the average is the gradient of the mean over the
  // whole batch for any shares: sum over ranks of (loss_sum * ranks / batch) / ranks.
  const double scale = static_cast<double>(group.size()) / static_cast<double>(options_.batch);
  traced("backward", [&] { (loss_sum * scale).backward(); });
  traced("optimizer", [&] { optimizer_.step(); });
  return lockstep::all_reduce_value(loss_sum.item<double>(), lockstep::ReduceOp::sum, group);
}

double Trainer::State::test(const lockstep::Group& group) {
  const torch::NoGradGuard no_grad;
  model_->eval();
  if (!options_.sync_bn) {
    // Running statistics differ between ranks: test with those of rank 0, which are saved.
    for (torch::Tensor& buffer : model_->buffers())
      lockstep::nn::broadcast(buffer, /*src=*/0, group);
  }
  std::vector<std::int64_t> all(n_test_);
  std::iota(all.begin(), all.end(), 0);
  auto part = part_of(std::span<const std::int64_t>(all), cut(n_test_, group.size()), group.rank());
  std::int64_t n_right = 0;
  while (!part.empty()) {
    const auto now = part.first(std::min(part.size(), kTestBatch));
    part = part.subspan(now.size());
    const Samples::Batch batch = test_.batch(now);
    n_right += model_->forward(batch.input).argmax(1).eq(batch.labels).sum().item<std::int64_t>();
  }
  n_right = lockstep::all_reduce_value(n_right, lockstep::ReduceOp::sum, group);
  return static_cast<double>(n_right) / static_cast<double>(n_test_);
}

std::vector<EpochResult> Trainer::State::run(const lockstep::Group& group) {
  const auto shares = shares_of(options_.batch, group.size(), options_.shares);
  if (group.rank() == 0 && !options_.save.empty()) check_can_save(options_.save);
  compare_positions(group);
  std::optional<Report> report;
  if (group.rank() == 0) report.emplace(options_, steps_per_epoch_, at_.step);
  if (options_.sync_bn) lockstep::nn::convert_sync_batchnorm(model_, group);
  Network network(Replicated(model_, options_.data_parallel), {.group = group});

  std::vector<EpochResult> epochs;
  while (!done()) {
    epochs.push_back(run_epoch(network, shares, group, report));
    if (report) report->after_epoch(epochs.back());
    if (options_.save.empty()) continue;
    const auto write = [this](auto& archive) {
      write_checkpoint(archive, *model_, optimizer_, at_);
    };
    lockstep::nn::save_checkpoint(options_.save.string(), write, group);
  }
  if (report && !epochs.empty()) report->summary(epochs, at_.seed, shares);
  return epochs;
}

EpochResult Trainer::State::run_epoch(Network& network, std::span<const std::size_t> shares,
                                      const lockstep::Group& group, std::optional<Report>& report) {
  const std::size_t first = at_.step;
  const std::size_t epoch = first / steps_per_epoch_;
  const auto order = epoch_order(n_train_, at_.seed, epoch);
  const auto start = Clock::now();
  model_->train();
  do {
    const auto batch = std::span<const std::int64_t>(order).subspan(
        at_.step % steps_per_epoch_ * options_.batch, options_.batch);
    const double loss_sum = step(network, part_of(batch, shares, group.rank()), group);
    at_.epoch_loss_sum += loss_sum;
    ++at_.step;
    if (report) report->after_step(at_.step, loss_sum / static_cast<double>(options_.batch));
  } while (at_.step % steps_per_epoch_ != 0 && !done());

  const std::chrono::duration<double> elapsed = Clock::now() - start;
  const auto n_images = [&](std::size_t since) {
    return static_cast<double>((at_.step - since) * options_.batch);
  };
  EpochResult result{.step = at_.step,
                     .loss = at_.epoch_loss_sum / n_images(epoch * steps_per_epoch_),
                     .seconds = elapsed.count(),
                     .images_per_second = n_images(first) / elapsed.count()};
  if (at_.step % steps_per_epoch_ == 0) at_.epoch_loss_sum = 0;
  result.test_accuracy = test(group);
  return result;
}

Trainer::Trainer(const Options& options, const Dataset& data)
    : state_(std::make_unique<State>(options, data)) {}
Trainer::~Trainer() = default;

std::vector<EpochResult> Trainer::run(const lockstep::Group& group) { return state_->run(group); }

}  // namespace train
