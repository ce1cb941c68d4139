// A training on the digits that goes on after lost ranks: ends with the parameters in the file OUT,
// and says of every rank what they are.
// elastic_training DIGITS OUT STEPS MODE, of which MODE is
//   alone         nothing disturbs it
//   random KILLS  a process ends at a random time in every 24 steps
//   until FILE    not for STEPS, but until FILE is there; a step takes 20 ms at least
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
#include <fmt/format.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fate.hpp"
#include "train/data.hpp"
#include "train/models.hpp"

namespace {

namespace nn = lockstep::nn;

constexpr double kRate = 0.02, kDecay = 0.95;

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

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const std::string out = argv[2], mode = argv[4];
  const int n_steps = std::atoi(argv[3]);
  const std::string last_word = argv[argc - 1];
  const bool is_resumed = last_word == "resumed", decays = last_word == "decays";
  const int place = fate::place();
  const bool is_replacement = fate::is_replacement();
  at::set_num_threads(1);
  // Its thread runs to the end of the process.
  fate::Fate* const fate =
      mode == "random"
          ? new fate::Fate(out + ".ends", argc > 5 ? std::atoi(argv[5]) : 0, /*n_steps=*/24)
          : nullptr;
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
      const auto is_done = [&] {
        if (mode != "until") return state.step() >= n_steps;
        const int is_there = std::filesystem::exists(argv[5]) ? 1 : 0;
        return lockstep::all_reduce_value(is_there, lockstep::ReduceOp::max) != 0;
      };
      while (!is_done()) {
        const auto step = static_cast<int>(state.step());
        const bool is_end = place == 3 && !is_replacement && step == 10;
        if (fate != nullptr) fate->train(step);
        if (mode == "until") std::this_thread::sleep_for(std::chrono::milliseconds(20));
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
    auto tensors = model->parameters();
    for (const torch::Tensor& buffer : model->buffers()) tensors.push_back(buffer);
    fate::report(fate::values_of(tensors), state.step(), out);
    if (lockstep::is_main_process() && fate != nullptr) {
      fmt::print("{} processes have ended\n", fate->n_done());
    }
  } catch (const lockstep::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
