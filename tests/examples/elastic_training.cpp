// A training on the digits that goes on after lost ranks: ends with the parameters in the file OUT,
// and says of every rank what they are.
// elastic_training DIGITS OUT STEPS MODE, of which MODE is
//   alone         nothing disturbs it
//   random KILLS  a process ends at a random time in every 24 steps
//   kill          place 3 is killed in the middle of step 10
//   leave         place 3 leaves before step 10
//   change        place 3 is killed when the others have changed parameters in a step that is not
//                 complete
//   snapshot      the same, with a snapshot
//   source        place 3 is killed when only place 0 has completed step 10, and place 0 when one
//                 of the others loads the state that it gave to them
//   stuck         each attempt throws PeerLost, and nobody is lost
// With a last word `decays` the learning rate is changed at the begin of each step; with `resumed`
// the first step is step 10, as if that state had been loaded.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "train/data.hpp"
#include "train/models.hpp"

namespace {

namespace nn = lockstep::nn;
using std::chrono::milliseconds;

constexpr int kStepsPerKill = 24;
constexpr double kRate = 0.02, kDecay = 0.95;

/// What the processes of the job share about their ends: a file.
struct Ends {
  std::atomic<int> n_done, n_training, step;
};

/// Ends this process at a random time of every kStepsPerKill steps, as one of those that train.
class Fate {
 public:
  Fate(const std::string& file, int n_kills) : n_kills_(n_kills) {
    fd_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd_ < 0 || ::ftruncate(fd_, 4096) != 0) throw std::runtime_error("cannot open " + file);
    ends_ = static_cast<Ends*>(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0));
    std::thread([this] { run(); }).detach();
  }
  /// At the begin of each step.
  void train(int step) {
    if (throws_) throw std::runtime_error("a rank that cannot go on");
    if (!is_training_.exchange(true)) ++ends_->n_training;
    int before = ends_->step;
    while (before < step && !ends_->step.compare_exchange_weak(before, step)) continue;
    // Until the end that is due has taken place.
    if (n_due() > ends_->n_done) std::this_thread::sleep_for(milliseconds(5));
  }
  int n_done() const { return ends_->n_done; }

 private:
  int n_due() const { return std::min(ends_->step / kStepsPerKill, n_kills_); }

  void run() {
    std::random_device random;
    while (true) {
      std::this_thread::sleep_for(milliseconds(1 + random() % 60));
      ::flock(fd_, LOCK_EX);
      // Two others go on.
      if (n_due() > ends_->n_done && (ends_->n_training >= 3 || !is_training_)) {
        ++ends_->n_done;
        if (is_training_) --ends_->n_training;
        end_as(random() % 4);
      }
      ::flock(fd_, LOCK_UN);
    }
  }

  void end_as(unsigned how) {
    if (how == 0) std::_Exit(3);
    if (how == 1 && is_training_) {
      throws_ = true;
      ::flock(fd_, LOCK_UN);
      while (true) ::pause();
    }
    ::kill(::getpid(), SIGKILL);
  }

  const int n_kills_;
  int fd_ = -1;
  Ends* ends_ = nullptr;
  std::atomic<bool> is_training_{false}, throws_{false};
};

/// A part of the state that ends the process it came from, if that is place 0.
struct Source {
  std::int64_t place = 0;
  bool is_killed = false;

  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("place", at::scalar_tensor(place));
    archive.write("process", at::scalar_tensor(std::int64_t{::getpid()}));
  }
  void load(torch::serialize::InputArchive& archive) const {
    at::Tensor from, process;
    archive.read("place", from);
    archive.read("process", process);
    if (is_killed && from.item<std::int64_t>() == 0) {
      ::kill(process.item<pid_t>(), SIGKILL);
    }
  }
};

std::vector<double> parameters_of(const torch::nn::Module& model) {
  std::vector<double> values;
  for (const torch::Tensor& parameter : model.parameters()) {
    const auto flat = parameter.detach().contiguous().view(-1);
    values.insert(values.end(), flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel());
  }
  for (const torch::Tensor& buffer : model.buffers()) {
    const auto flat = buffer.detach().to(torch::kDouble).contiguous().view(-1);
    values.insert(values.end(), flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel());
  }
  return values;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const std::string out = argv[2], mode = argv[4];
  const int n_steps = std::atoi(argv[3]);
  const std::string last_word = argv[argc - 1];
  const bool is_resumed = last_word == "resumed", decays = last_word == "decays";
  const int place = std::getenv("RANK") != nullptr ? std::atoi(std::getenv("RANK")) : 0;
  const bool is_replacement =
      std::string(std::getenv("LOCKSTEP_SEGMENT") != nullptr ? std::getenv("LOCKSTEP_SEGMENT") : "")
          .ends_with(":next");
  at::set_num_threads(1);
  // Its thread runs to the end of the process.
  Fate* const fate =
      mode == "random" ? new Fate(out + ".ends", argc > 5 ? std::atoi(argv[5]) : 0) : nullptr;
  try {
    const train::Images digits = train::read_dataset(argv[1]).train;
    // Parameters that only rank 0 has: the others get them.
    auto model = train::make_model("convnet", train::kClasses, torch::kDouble,
                                   static_cast<std::uint64_t>(place));
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(kRate).momentum(0.9));
    Source source{.place = place};
    nn::ElasticState state({model, optimizer, source}, {.snapshot = mode == "snapshot", .seed = 7});
    const nn::ElasticSampler sampler(digits.size(), {.global_batch = 32});

    const auto batch_of = [&](const std::vector<std::size_t>& samples) {
      const auto n = static_cast<std::int64_t>(samples.size());
      const auto height = static_cast<std::int64_t>(digits.height);
      const auto width = static_cast<std::int64_t>(digits.width);
      auto images = torch::empty({n, 1, height, width}, torch::kDouble);
      auto labels = torch::empty({n}, torch::kLong);
      for (std::int64_t i = 0; i < n; ++i) {
        const std::size_t sample = samples[static_cast<std::size_t>(i)];
        for (std::int64_t p = 0; p < height * width; ++p) {
          images.data_ptr<double>()[i * height * width + p] =
              digits.pixels[sample * digits.height * digits.width + static_cast<std::size_t>(p)] /
              255.0;
        }
        labels.data_ptr<std::int64_t>()[i] = digits.labels[sample];
      }
      return std::pair(images, labels);
    };

    nn::run_elastic(state, [&] {
      if (is_resumed && state.step() == 0) {
        const torch::NoGradGuard no_graph;
        for (torch::Tensor& parameter : model->parameters()) parameter.mul_(0.5);
        state.set_step(10);
      }
      nn::DistributedDataParallel ddp(model);
      const nn::SyncBatchNormScope scope;
      while (state.step() < n_steps) {
        const auto step = static_cast<int>(state.step());
        const bool is_end = place == 3 && !is_replacement && step == 10;
        if (fate != nullptr) fate->train(step);
        if (is_end && mode == "leave") std::exit(0);
        if (mode == "stuck") {
          throw lockstep::PeerLost({.operation = "forward"}, "a layer of an earlier world");
        }
        if (decays) {
          auto& rate = optimizer.param_groups()[0].options();
          rate.set_lr(rate.get_lr() * kDecay);
        }
        const auto [images, labels] = batch_of(sampler.batch(step));
        const auto scores = ddp.forward(images);
        if (is_end && mode == "kill") ::kill(::getpid(), SIGKILL);
        auto loss = torch::nn::functional::cross_entropy(scores, labels) *
                    state.scale(static_cast<std::size_t>(labels.size(0)));
        optimizer.zero_grad();
        loss.backward();
        if (mode == "source" && step == 10 && place != 0) {
          if (is_end) ::kill(::getpid(), SIGKILL);
          source.is_killed = true;
          throw lockstep::PeerLost({.operation = "step"}, "place 3 is killed");
        }
        optimizer.step();
        if (mode == "change" || mode == "snapshot") {
          if (is_end) ::kill(::getpid(), SIGKILL);
          lockstep::barrier();
        }
        state.step_done();
      }
    });
    const double rate = optimizer.param_groups()[0].options().get_lr();
    if (std::abs(rate - kRate * std::pow(decays ? kDecay : 1, n_steps)) > 1e-12) {
      throw std::logic_error(fmt::format("the learning rate is {}", rate));
    }
    const std::vector<double> parameters = parameters_of(*model);
    std::uint64_t bits = 0;
    for (const double value : parameters) {
      bits = bits * 0x9e3779b97f4a7c15ULL + std::bit_cast<std::uint64_t>(value);
    }
    fmt::print("rank {} of {}: {} steps, parameters {:016x}\n", lockstep::get_rank(),
               lockstep::get_world_size(), state.step(), bits);
    std::fflush(stdout);
    if (lockstep::is_main_process()) {
      if (fate != nullptr) fmt::print("{} processes have ended\n", fate->n_done());
      std::ofstream(out, std::ios::binary)
          .write(reinterpret_cast<const char*>(parameters.data()),
                 static_cast<std::streamsize>(parameters.size() * sizeof(double)));
    }
  } catch (const lockstep::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
