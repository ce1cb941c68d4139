// Of the libtorch layer: a communication hook, join with uneven data, and SyncBatchNormScope.
#include <torch/torch.h>

#include <cstdio>
#include <functional>

#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>

namespace nn = lockstep::nn;

// A hook replaces the averaging of a bucket of gradients: this one averages it and counts.
void use_a_hook() {
  torch::nn::Linear net(8, 1);
  int n_buckets = 0;
  nn::DistributedDataParallelOptions options;
  options.comm_hook = [&](const nn::GradientBucket& bucket) -> std::function<void()> {
    ++n_buckets;
    auto work = nn::all_reduce_async(bucket.gradients, lockstep::ReduceOp::mean, bucket.group);
    return [work]() mutable { work.wait(); };  // called before backward returns
  };
  nn::DistributedDataParallel model(net, options);
  const auto loss = model(torch::ones({2, 8})).sum() * (lockstep::get_rank() + 1);
  loss.backward();  // gradients of the bias: 2 on rank 0, 4 on rank 1
  std::printf("hook: %d bucket, the average gradient of the bias is %g\n", n_buckets,
              net->bias.grad().item<double>());
}

// Ranks with different numbers of batches: those that are done follow the others' steps.
void join_with_uneven_data() {
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
  nn::convert_sync_batchnorm(net);
  nn::DistributedDataParallel model(net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const int n_batches = lockstep::get_rank() + 1;
  model.join(
      [&] {
        for (int batch = 0; batch < n_batches; ++batch) {
          optimizer.zero_grad();
          model(torch::randn({2, 4})).square().sum().backward();
          optimizer.step();
        }
      },
      {.example_input = torch::zeros({1, 4}), .optimizers = {&optimizer}});
  nn::assert_in_sync(*net, optimizer);  // throws if the ranks differ in any bit
  std::printf("join: trained on %d batches, in sync\n", n_batches);
}

// A scope synchronises every batch_norm called in it, and leaves the network as it is.
void normalise_in_a_scope() {
  torch::nn::BatchNorm1d norm(torch::nn::BatchNormOptions(3).momentum(1.0));
  {
    const nn::SyncBatchNormScope scope;
    norm->forward(torch::full({2, 3}, static_cast<double>(lockstep::get_rank()), torch::kFloat32));
  }
  std::printf("scope: the running mean is %g\n", norm->running_mean.mean().item<double>());
}

int main() {
  lockstep::init_dist();
  use_a_hook();
  join_with_uneven_data();
  normalise_in_a_scope();
}
