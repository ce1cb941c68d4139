// Trainings of which each reads something else from step to step, and goes on after lost ranks.
// elastic_programs PROGRAM OUT POINT [KILLS SEED [FILE]]: ends with what it has computed in the
// file OUT. At POINT place 1 is killed, in the middle of the second epoch where that has a meaning;
// `complete`: when the training is, and place 0 has still something to do for longer than any
// limit; `alone`: nothing disturbs it; `random`: KILLS processes end at random times; `all`: all
// are killed after the second epoch; `edited`: the first replacement has another network. FILE: of
// ElasticOptions::save.
//   branches    a layer is not used in each step, by Adam, which moves a parameter with a zero
//               gradient and leaves one without a gradient alone
//   modes       validation in eval mode, statistics of BatchNorm, a layer is frozen after an epoch
//   options     a schedule, and betas that change in each step
//   objects     a list and a number
//   random      numbers that all ranks draw alike
//   own         each rank draws numbers of its own from the first step on; own_first: before
//   accumulate  micro-batches
//   two         two optimizers that step together
//   alternate   two optimizers with a backward between them, and a snapshot
//   shards      a step in shards, with the same bits whatever happens
//   by_hand     a hand-written optimizer, a clamp, an average of the parameters
// Programs that are refused: `inside` and `unlisted` make their optimizer in the function,
// `micro_steps` calls step_done without a step of the optimizer, `continue` and `break` leave a
// step and an epoch out, `gloo` trains over another engine.
#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdlib>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fate.hpp"

namespace {

namespace nn = lockstep::nn;
using torch::Tensor;

constexpr std::size_t kSamples = 64, kBatch = 24, kEpochs = 6, kMicroBatches = 2;
constexpr int kShards = 5;
constexpr std::int64_t kFatalStep = 4;  // the second of the second epoch

/// Where this process is, and where it is killed.
struct Point {
  std::string fatal;
  std::int64_t step = 0;
  bool is_training = false;  ///< in run_elastic's function

  void at(const std::string& point, int place = 1) const {
    if (point == fatal && fate::place() == place && !fate::is_replacement()) {
      ::kill(::getpid(), SIGKILL);
    }
  }
  void in_step(const std::string& point) const {
    if (step == kFatalStep) at(point);
  }
};

/// file: notes that there has been one.
bool is_first_replacement(const std::string& file) {
  if (!fate::is_replacement() || std::ifstream(file)) return false;
  std::ofstream(file) << "a replacement";
  return true;
}

/// A part of the state: what has been seen in each epoch. The process that sends it may be killed,
/// or the first one that loads it.
struct Seen {
  std::vector<double> values{};
  Point* point = nullptr;
  std::string file{};

  void save(torch::serialize::OutputArchive& archive) const {
    const bool is_sent = !point->is_training && point->step >= kFatalStep;
    if (is_sent && lockstep::get_world_size() == 3) point->at("sent", /*place=*/0);
    archive.write("values", torch::tensor(values, torch::kDouble));
  }
  void load(torch::serialize::InputArchive& archive) {
    if (point->fatal == "loaded" && is_first_replacement(file)) ::kill(::getpid(), SIGKILL);
    Tensor saved;
    archive.read("values", saved);
    values.assign(saved.data_ptr<double>(), saved.data_ptr<double>() + saved.numel());
  }
};

struct NetworkImpl : torch::nn::Cloneable<NetworkImpl> {
  explicit NetworkImpl(const Point& where, int n = 6) : point(&where), n_hidden(n) { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(5, n_hidden));
    norm = register_module("norm", torch::nn::BatchNorm1d(n_hidden));
    second = register_module("second", torch::nn::Linear(n_hidden, 2));
    branch = register_module("branch", torch::nn::Linear(n_hidden, 2));
  }
  Tensor forward(const Tensor& images, bool uses_branch) {
    const Tensor hidden = torch::tanh(norm(first(images)));
    point->in_step("forward");
    return uses_branch ? branch(hidden) : second(hidden);
  }
  const Point* point;
  int n_hidden;
  torch::nn::Linear first{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear second{nullptr}, branch{nullptr};
};
TORCH_MODULE(Network);

/// A training and its data.
class Program {
 public:
  Program(std::string name, std::string out, std::string fatal, int n_kills, unsigned seed,
          std::string file)
      : name_(std::move(name)),
        out_(std::move(out)),
        file_(std::move(file)),
        point_{.fatal = std::move(fatal)} {
    torch::manual_seed(1);
    images_ = torch::randn({kSamples, 5}, torch::kDouble);
    targets_ = torch::randn({kSamples, 2}, torch::kDouble);
    const bool is_edited = point_.fatal == "edited" && is_first_replacement(out_ + ".edited");
    network_ = Network(point_, is_edited ? 7 : 6);
    average_ = Network(point_);
    network_->to(torch::kDouble);
    average_->to(torch::kDouble);
    seen_.point = &point_;
    seen_.file = out_ + ".loaded";
    if (point_.fatal == "random") {
      fate_ = new fate::Fate(out_ + ".ends", n_kills, /*n_steps=*/4, seed);
    }
    torch::manual_seed(name_ == "own_first" ? 50 + fate::place() : 2);
  }

  void run() {
    point_.at("unjoined");
    const auto heads = [&] {
      auto parameters = network_->second->parameters();
      for (const Tensor& parameter : network_->branch->parameters()) {
        parameters.push_back(parameter);
      }
      return parameters;
    }();
    auto body = network_->first->parameters();
    for (const Tensor& parameter : network_->norm->parameters()) body.push_back(parameter);
    torch::optim::Adam adam(network_->parameters(), torch::optim::AdamOptions(0.02));
    torch::optim::Adam of_heads(heads, torch::optim::AdamOptions(0.02));
    torch::optim::SGD of_body(body, torch::optim::SGDOptions(0.05).momentum(0.9));
    nn::SavedScheduler<torch::optim::StepLR> schedule(adam, /*step_size=*/2, /*gamma=*/0.5);
    if (name_ == "by_hand") {
      nn::ElasticState state({network_, average_, seen_, n_}, {.by_hand = network_->parameters()});
      return train(state, {});
    }
    if (name_ == "two" || name_ == "alternate") {
      nn::ElasticState state({network_, of_heads, of_body, seen_, n_},
                             {.snapshot = name_ == "alternate"});
      return train(state, {of_heads, of_body});
    }
    if (name_ == "inside" || name_ == "unlisted") {
      nn::ElasticState state({network_, seen_, n_});
      return train(state, {adam});
    }
    nn::ElasticState state({network_, adam, schedule, seen_, n_}, {.save = file_});
    return train(state, {adam}, &schedule);
  }

 private:
  using Optimizers = std::vector<std::reference_wrapper<torch::optim::Optimizer>>;

  void train(nn::ElasticState& state, const Optimizers& optimizers,
             torch::optim::LRScheduler* schedule = nullptr) {
    const nn::ElasticSampler sampler(kSamples,
                                     {.global_batch = kBatch,
                                      .seed = 3,
                                      .micro_batches = name_ == "accumulate" ? kMicroBatches : 1,
                                      .shards = name_ == "shards" ? kShards : 0});
    network_->train();
    nn::run_elastic(state,
                    [&] {
                      const struct Inside {
                        Point& point;
                        explicit Inside(Point& of) : point(of) { point.is_training = true; }
                        ~Inside() { point.is_training = false; }
                      } inside(point_);
                      try {
                        if (!file_.empty()) fmt::print("begins with step {}\n", state.step());
                        nn::DistributedDataParallel ddp(
                            network_, {.shards = name_ == "shards" ? kShards : 0});
                        const nn::SyncBatchNormScope scope;
                        for (const std::size_t epoch : state.epochs(sampler, kEpochs)) {
                          for (const std::int64_t step : sampler.steps(state)) {
                            if (name_ == "continue") continue;
                            begin_step(step);
                            compute(step, ddp, state, sampler, optimizers);
                            point_.in_step("before_step_done");
                            complete(state, optimizers);
                            point_.in_step("after_step_done");
                            if (name_ == "break") break;
                          }
                          end_epoch(epoch, schedule);
                        }
                        point_.at("end");
                      } catch (const lockstep::PeerLost&) {
                        point_.at("regroup", /*place=*/2);  // while the others regroup
                        throw;
                      }
                    },
                    {.backend = name_ == "gloo" ? "gloo" : "auto"});
    point_.at("complete");
    if (name_.starts_with("own")) check_own_numbers();
    if (point_.fatal == "complete" && fate::place() == 0) {
      std::this_thread::sleep_for(std::chrono::seconds(6));
    }
    std::vector<Tensor> tensors = network_->parameters();
    for (const Tensor& buffer : network_->buffers()) tensors.push_back(buffer);
    for (const Tensor& parameter : average_->parameters()) tensors.push_back(parameter);
    auto values = fate::values_of(tensors);
    values.insert(values.end(), seen_.values.begin(), seen_.values.end());
    values.push_back(n_);
    fate::report(values, state.step(), out_);
    if (lockstep::is_main_process() && fate_ != nullptr) {
      fmt::print("{} processes have ended\n", fate_->n_done());
    }
  }

  static void check_own_numbers() {
    const auto drawn = lockstep::all_gather_object(torch::rand({1}, torch::kDouble).item<double>());
    if (std::set(drawn.begin(), drawn.end()).size() < drawn.size()) {
      throw lockstep::UsageError({.operation = "own"}, "two ranks have drawn the same number");
    }
  }

  void begin_step(std::int64_t step) {
    point_.step = step;
    if (name_ == "own" && step == 0) torch::manual_seed(100 + lockstep::get_rank());
    if (point_.fatal == "all" && step == 6) ::kill(::getpid(), SIGKILL);
    // Of whose replacement something is told.
    for (const std::string of : {"sent", "loaded", "edited"}) point_.in_step(of);
    if (fate_ != nullptr) fate_->train(static_cast<int>(step));
    // Until the replacement has come: what it gets matters to the steps that follow.
    const bool is_awaited = fate_ == nullptr && point_.fatal != "alone" && step > kFatalStep + 2;
    const int n = std::atoi(std::getenv("WORLD_SIZE"));
    while (is_awaited && lockstep::get_world_size() < n && !lockstep::has_waiting_replacements()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    point_.in_step(point_.fatal == "regroup" && fate::place() == 1 ? "regroup" : "before_forward");
  }

  void compute(std::int64_t step, nn::DistributedDataParallel<Network>& ddp,
               nn::ElasticState& state, const nn::ElasticSampler& sampler,
               const Optimizers& optimizers) {
    for (torch::optim::Optimizer& optimizer : optimizers) {
      for (auto& group : optimizer.param_groups()) zero_gradients(group.params());
    }
    if (name_ == "by_hand") zero_gradients(network_->parameters());
    if (name_ == "shards") return compute_in_shards(step, ddp, sampler);
    const std::size_t n_micro = name_ == "accumulate" ? kMicroBatches : 1;
    // Of all samples of the step, alike on all ranks.
    const Tensor weights = name_ == "random" ? torch::rand({kSamples}, torch::kDouble)
                                             : torch::ones({kSamples}, torch::kDouble);
    for (std::size_t micro = 0; micro < n_micro; ++micro) {
      const auto backward = [&] {
        const auto drawn = sampler.batch(step, micro);
        loss(drawn, weights, ddp, step)
            .mul(state.scale(drawn.size(), sampler.n_samples(step)))
            .backward();
      };
      if (micro + 1 < n_micro) {
        const auto no_sync = ddp.no_sync();
        backward();
      } else {
        backward();
      }
    }
    if (name_ == "options") {
      for (auto& group : optimizers.front().get().param_groups()) {
        auto& options = static_cast<torch::optim::AdamOptions&>(group.options());
        const auto [first, second] = options.betas();
        options.betas({first * 0.95, second});
      }
    }
    n_ += 0.5 * static_cast<double>(step + 1);
    if (name_ == "alternate") {
      optimizers.front().get().step();
      point_.in_step("between");
      for (auto& group : optimizers.back().get().param_groups()) zero_gradients(group.params());
      const auto drawn = sampler.batch(step, std::size_t{0});
      loss(drawn, weights, ddp, step).mul(state.scale(drawn.size())).backward();
      optimizers.back().get().step();
    }
  }

  void compute_in_shards(std::int64_t step, nn::DistributedDataParallel<Network>& ddp,
                         const nn::ElasticSampler& sampler) {
    const auto drawn = sampler.batch(step);
    const auto at = torch::tensor(std::vector<std::int64_t>(drawn.begin(), drawn.end()));
    const std::pair batch(images_.index_select(0, at), targets_.index_select(0, at));
    n_ += ddp.run_shards(batch, [this](Network& mine, const auto& part) {
      const Tensor scores = mine->forward(part.first, false);
      scores.register_hook([this](const Tensor&) { point_.in_step("backward"); });
      return (scores - part.second).square().mean(1).sum();
    });
  }

  static void zero_gradients(const std::vector<Tensor>& parameters) {
    for (const Tensor& parameter : parameters) {
      if (parameter.grad().defined()) parameter.mutable_grad().detach_().zero_();
    }
  }

  Tensor loss(const std::vector<std::size_t>& drawn, const Tensor& weights,
              nn::DistributedDataParallel<Network>& ddp, std::int64_t step) {
    const auto at = torch::tensor(std::vector<std::int64_t>(drawn.begin(), drawn.end()));
    const bool uses_branch = name_ == "branches" && step % 3 == 0;
    const Tensor scores = ddp.forward(images_.index_select(0, at), uses_branch);
    scores.register_hook([this](const Tensor&) { point_.in_step("backward"); });
    const Tensor errors = (scores - targets_.index_select(0, at)).square().mean(1);
    return (errors * weights.index_select(0, at)).mean() *
           (name_ == "objects" ? 1 / (1 + n_ / 100) : 1.0);
  }

  void complete(nn::ElasticState& state, const Optimizers& optimizers) {
    if (name_ == "by_hand") {
      state.step_done([this] {
        const torch::NoGradGuard no_graph;
        const auto averages = average_->parameters();
        std::size_t i = 0;
        for (Tensor& parameter : network_->parameters()) {
          if (parameter.grad().defined()) parameter.sub_(parameter.grad() * 0.05);
          parameter.clamp_(-0.6, 0.6);
          averages[i++].mul_(0.9).add_(parameter, 0.1);
        }
      });
    } else if (name_ == "micro_steps") {
      state.step_done();
    } else if (name_ == "two" || name_ == "unlisted") {
      state.step_done({optimizers.front(), optimizers.back()});
    } else if (name_ == "alternate") {
      state.step_done();
    } else {
      optimizers.front().get().step();
      state.step_done();
    }
  }

  void end_epoch(std::size_t epoch, torch::optim::LRScheduler* schedule) {
    if (epoch == 1) point_.at("end_of_epoch");
    if (schedule != nullptr && name_ == "options") schedule->step();
    network_->eval();
    const torch::NoGradGuard no_graph;
    const auto all = torch::arange(static_cast<std::int64_t>(kSamples));
    // A sum of the ranks' sums has other bits on another number of ranks.
    const bool divides = name_ != "shards";
    const Tensor mine = !divides ? all
                                 : all.tensor_split(lockstep::get_world_size())
                                       .at(static_cast<std::size_t>(lockstep::get_rank()));
    const Tensor errors =
        network_->forward(images_.index_select(0, mine), false) - targets_.index_select(0, mine);
    if (epoch == 1) point_.at("validation");
    const double sum = lockstep::all_reduce_value(errors.square().sum().item<double>());
    seen_.values.push_back(divides ? sum : errors.square().sum().item<double>());
    network_->train();
    if (name_ == "modes" && epoch == 0) {
      for (Tensor& parameter : network_->first->parameters()) parameter.set_requires_grad(false);
    }
    if (epoch == 1) point_.at("after_validation");
  }

  const std::string name_, out_, file_;
  Point point_;
  Tensor images_, targets_;
  Network network_{nullptr}, average_{nullptr};
  Seen seen_;
  double n_ = 0;
  fate::Fate* fate_ = nullptr;  // its thread runs to the end of the process
};                              // namespace

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  at::set_num_threads(1);
  if (argv[3] == std::string("complete")) ::setenv("LOCKSTEP_TIMEOUT", "2", 1);
  try {
    Program(argv[1], argv[2], argv[3], argc > 4 ? std::atoi(argv[4]) : 0,
            argc > 5 ? static_cast<unsigned>(std::atoi(argv[5])) : 1, argc > 6 ? argv[6] : "")
        .run();
  } catch (const lockstep::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
