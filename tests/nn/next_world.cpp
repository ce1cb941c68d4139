// A rank whose layers outlive its world.
//   next_world again|regroup|twice  the next world begins by destroy_dist and init_dist, by
//   regroup,
//                                   by regroup after a regroup
//   next_world train [inside|outside]  run_elastic, with layers converted inside its function or
//                                   before it; one of three ranks is killed. Prints a sum
//   next_world wrapper              the same with a DistributedDataParallel of the first generation
#include "next_world.hpp"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <lockstep/elastic.hpp>
#include <lockstep/nn/elastic.hpp>
#include <stdexcept>

namespace {

namespace ls = lockstep;
namespace nn = lockstep::nn;
using Problems = std::vector<std::string>;

void require_none(const Problems& problems) {
  for (const std::string& problem : problems) std::printf("%s\n", problem.c_str());
  if (!problems.empty()) throw std::logic_error("see above");
}

void use_worlds(const std::string& how) {
  ls::init_dist();
  if (how == "twice") ls::regroup();
  nn::testing::LayersOfAWorld layers;
  require_none(layers.use());
  const ls::Group half = ls::default_group().split(0);
  if (how == "again") {
    ls::destroy_dist();
    ls::init_dist();
  } else {
    ls::regroup();
  }
  require_none(layers.use_in_the_next());
  try {
    nn::SyncBatchNorm1d(nn::SyncBatchNormOptions(1).group(half))->forward(torch::ones({2, 1}));
  } catch (const ls::UsageError& error) {
    std::printf("%s\n", error.what());
  }
  ls::barrier();
  const int rank = ls::get_rank();
  ls::destroy_dist();
  require_none(layers.use_alone());
  std::printf("rank %d is done\n", rank);
}

struct NetImpl : torch::nn::Module {
  torch::nn::Sequential first{torch::nn::Linear(5, 6), torch::nn::BatchNorm1d(6),
                              torch::nn::Tanh()};
  nn::SyncBatchNorm1d second{6};
  torch::nn::Linear last{6, 3};
  NetImpl() {
    register_module("first", first);
    register_module("second", second);
    register_module("last", last);
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(second(first->forward(x))); }
};
TORCH_MODULE(Net);

void train(const std::string& how) {
  constexpr std::size_t kSamples = 14;
  const bool is_replacement = std::getenv("LOCKSTEP_SEGMENT") != nullptr &&
                              std::string(std::getenv("LOCKSTEP_SEGMENT")).ends_with(":next");
  torch::manual_seed(1);
  Net model;
  model->to(torch::kDouble);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto images = torch::randn({kSamples, 5}, torch::kDouble);
  const auto labels = torch::randint(3, {kSamples}, torch::kLong);
  nn::ElasticState state({model, optimizer});
  const nn::ElasticSampler sampler(kSamples, {.global_batch = 6});
  if (how == "outside") nn::convert_sync_batchnorm(model);
  std::optional<nn::DistributedDataParallel<Net>> ddp;
  int n_attempts = 0;
  nn::run_elastic(state, [&] {
    ++n_attempts;
    if (how != "outside") nn::convert_sync_batchnorm(model);
    if (how != "wrapper" || !ddp) ddp.emplace(model);
    while (state.step() < 20) {
      const auto mine = sampler.batch(state.step());
      const auto index =
          torch::tensor(std::vector<std::int64_t>(mine.begin(), mine.end()), torch::kLong);
      try {
        const auto loss =
            torch::nn::functional::cross_entropy(ddp->forward(images.index_select(0, index)),
                                                 labels.index_select(0, index)) *
            state.scale(mine.size());
        const bool is_killed = ls::get_rank() == 1 && state.step() == 5 && !is_replacement;
        if (how != "alone" && is_killed && n_attempts == 1) ::raise(SIGKILL);
        optimizer.zero_grad();
        loss.backward();
      } catch (const ls::UsageError&) {
        std::printf("attempt %d: UsageError\n", n_attempts);
        std::fflush(stdout);
        throw;
      }
      optimizer.step();
      state.step_done();
    }
  });
  double sum = 0;
  for (const auto& parameter : model->parameters()) {
    sum += parameter.detach().abs().sum().item<double>();
  }
  for (const auto& buffer : model->buffers()) sum += buffer.sum().item().toDouble();
  if (ls::is_main_process()) std::printf("sum %.11f\n", sum);
}

}  // namespace

int main(int argc, char** argv) try {
  torch::set_num_threads(1);
  const std::string how = argc > 1 ? argv[1] : "";
  if (how == "train" || how == "wrapper") {
    train(how == "wrapper" ? how : argc > 2 ? argv[2] : "alone");
  } else {
    use_worlds(how);
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
