// What ElasticState::step_done costs beside the step, of ResNet-18 with Adam: for bench/elastic.py
// --keep.
//     lockstep run -n 1 --elastic 1 -- bench_elastic_state

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>
#include <vector>

#include "resnet18.hpp"

int main() {
  using Clock = std::chrono::steady_clock;
  torch::set_num_threads(1);
  auto model = lockstep::bench::resnet18(/*n_classes=*/1000);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-3));
  lockstep::nn::SavedScheduler<torch::optim::StepLR> schedule(optimizer, 30);
  for (const auto& parameter : model->parameters()) {
    parameter.mutable_grad() = torch::zeros_like(parameter);
  }
  lockstep::nn::ElasticState state({model, optimizer, schedule});
  lockstep::nn::run_elastic(state, [&] {
    constexpr int kTimes = 300, kSteps = 10;
    std::vector<double> times;
    for (int i = 0; i < kTimes; ++i) {
      const auto begin = Clock::now();
      for (int step = 0; step < kSteps; ++step) state.step_done([] {});
      times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count() /
                      kSteps);
    }
    std::ranges::sort(times);
    fmt::print("{} parameters, {} buffers: median {:.1f} us, least {:.1f} us\n",
               model->parameters().size(), model->buffers().size(), times[kTimes / 2], times[0]);
  });
}
