#include <torch/torch.h>

#include <cstdio>

#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>

int main() {
  lockstep::init_dist();
  const auto [rank, n_ranks] = lockstep::get_dist_info();
  torch::manual_seed(1);  // the same network and the same data on all ranks

  namespace nn = torch::nn;
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(1, 8, 3)), nn::BatchNorm2d(8), nn::ReLU(),
                     nn::AdaptiveAvgPool2d(1), nn::Flatten(), nn::Linear(8, 2));
  net->to(torch::kFloat64);
  lockstep::nn::convert_sync_batchnorm(net);         // statistics over all ranks' batches
  lockstep::nn::DistributedDataParallel model(net);  // gradients averaged during backward
  torch::optim::SGD optimizer(net->parameters(), 0.2);

  for (int step = 0; step < 60; ++step) {
    const auto labels = torch::randint(2, {24}, torch::kLong);
    const auto images = torch::randn({24, 1, 12, 12}) * (labels.view({24, 1, 1, 1}) + 1);
    const auto my_labels = labels.tensor_split(n_ranks)[rank];
    const auto my_images = images.tensor_split(n_ranks)[rank].to(torch::kFloat64);

    const auto loss = nn::functional::cross_entropy(model(my_images), my_labels);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();

    const double mean = lockstep::all_reduce_value(loss.item<double>(), lockstep::ReduceOp::mean);
    if (rank == 0 && step % 20 == 19) std::printf("step %d, loss %.4f\n", step + 1, mean);
  }
}
