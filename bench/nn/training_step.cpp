// Training steps of a whole program, for bench/training_steps.py, which has the same in Python:
//     bench_training_step convnet|resnet18 f32|bf16 THREADS STEPS
// As ranks of `lockstep run`: DistributedDataParallel and SyncBatchNorm, and equal parts of the
// batch; alone: the network as it is, with the whole batch. Prints one line of JSON on rank 0.

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>
#include <string>

#include "rank.hpp"
#include "resnet18.hpp"

namespace {

using namespace lockstep::bench;
using Clock = std::chrono::steady_clock;

constexpr int kUntimed = 2;  // the first allocates, and then buckets are rebuilt

Sequential convnet() {
  Sequential net;
  std::int64_t in = 1;
  for (const std::int64_t out : {16, 32, 64}) {
    net->push_back(Conv2d(Conv2dOptions(in, out, 3).stride(2).padding(1)));
    net->push_back(BatchNorm2d(out));
    net->push_back(ReLU());
    in = out;
  }
  net->push_back(AdaptiveAvgPool2d(1));
  net->push_back(Flatten());
  net->push_back(Linear(in, 10));
  return net;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) throw std::runtime_error("expected MODEL TYPE THREADS STEPS");
  const std::string model = argv[1], type = argv[2];
  if ((model != "convnet" && model != "resnet18") || (type != "f32" && type != "bf16")) {
    throw std::runtime_error("there is no " + model + " of " + type);
  }
  const int n_steps = std::atoi(argv[4]);
  init_rank(std::atoi(argv[3]));
  const int rank = lockstep::get_rank(), n_ranks = lockstep::get_world_size();
  const bool is_small = model == "convnet";
  const auto dtype = type == "bf16" ? torch::kBFloat16 : torch::kFloat32;

  torch::manual_seed(1);
  Sequential net = is_small ? convnet() : resnet18(/*n_classes=*/1000);
  net->to(dtype);
  torch::manual_seed(2);
  const std::int64_t n_images = 32, n_each = n_images / n_ranks, size = is_small ? 28 : 64;
  const Tensor x = torch::randn({n_images, is_small ? 1 : 3, size, size});
  const Tensor labels = torch::randint(is_small ? 10 : 1000, {n_images});
  const Tensor my_x = x.narrow(0, rank * n_each, n_each).to(dtype);
  const Tensor my_labels = labels.narrow(0, rank * n_each, n_each);

  if (n_ranks > 1) lockstep::nn::convert_sync_batchnorm(net);
  const auto ddp = n_ranks > 1
                       ? std::make_unique<lockstep::nn::DistributedDataParallel<Sequential>>(net)
                       : nullptr;
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(1e-3));
  double loss = 0;
  const auto step = [&] {
    sgd.zero_grad();
    const Tensor scores = ddp ? (*ddp)(my_x) : net->forward(my_x);
    const Tensor mine = torch::cross_entropy_loss(scores.to(torch::kFloat32), my_labels);
    mine.backward();
    sgd.step();
    loss = mine.item<double>();
  };
  for (int i = 0; i < kUntimed; ++i) step();
  lockstep::barrier();
  const auto begin = Clock::now();
  for (int i = 0; i < n_steps; ++i) step();
  lockstep::barrier();
  const std::chrono::duration<double> seconds = Clock::now() - begin;
  const double mean = lockstep::all_reduce_value(loss, lockstep::ReduceOp::mean);
  if (rank == 0) {
    fmt::print("{{\"images_per_second\": {}, \"loss\": {}}}\n",
               static_cast<double>(n_images * n_steps) / seconds.count(), mean);
  }
  lockstep::destroy_dist();
  return 0;
}
