// Training steps of a whole program, for bench/training_steps.py, which has the same in Python:
//     bench_training_step convnet|resnet18|resnet18_8 f32|f64|bf16 THREADS STEPS [SHARDS|LAYERS]
// As ranks of `lockstep run`: DistributedDataParallel and SyncBatchNorm, and equal parts of the
// batch; alone: the network as it is, with the whole batch; with SHARDS both in shards; with LAYERS
// these (none, sync, ddp, both) and half of the batch. resnet18_8: with 8 channels for 64, of
// images of 16 x 16. Prints one line of JSON on rank 0.

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>
#include <lockstep/nn/elastic.hpp>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

/// A hash of the bytes of all parameters and buffers.
std::uint64_t bits_of(const Module& net) {
  std::uint64_t hash = 0;
  const auto add = [&hash](const Tensor& tensor) {
    const Tensor whole = tensor.detach().contiguous();
    const std::string_view bytes(static_cast<const char*>(whole.data_ptr()), whole.nbytes());
    hash = 31 * hash + std::hash<std::string_view>()(bytes);
  };
  for (const Tensor& parameter : net.parameters()) add(parameter);
  for (const Tensor& buffer : net.buffers()) add(buffer);
  return hash;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6)
    throw std::runtime_error("expected MODEL TYPE THREADS STEPS [SHARDS|LAYERS]");
  const std::string model = argv[1], type = argv[2];
  if ((model != "convnet" && model != "resnet18" && model != "resnet18_8") ||
      (type != "f32" && type != "f64" && type != "bf16")) {
    throw std::runtime_error("there is no " + model + " of " + type);
  }
  const int n_steps = std::atoi(argv[4]);
  init_rank(std::atoi(argv[3]));
  const int rank = lockstep::get_rank(), n_ranks = lockstep::get_world_size();
  const std::string option = argc == 6 ? argv[5] : "0";
  const int n_shards = std::atoi(option.c_str());
  const bool has_layers = argc == 6 && n_shards == 0;
  const bool is_small = model == "convnet";
  const auto dtype = type == "f64"    ? torch::kFloat64
                     : type == "bf16" ? torch::kBFloat16
                                      : torch::kFloat32;

  torch::manual_seed(1);
  Sequential net = is_small ? convnet() : resnet18(1000, nullptr, model == "resnet18" ? 64 : 8);
  net->to(dtype);
  torch::manual_seed(2);
  const std::int64_t n_images = 32, size = is_small ? 28 : model == "resnet18" ? 64 : 16;
  const Tensor x = torch::randn({n_images, is_small ? 1 : 3, size, size});
  const Tensor labels = torch::randint(is_small ? 10 : 1000, {n_images});
  const lockstep::nn::ElasticSampler sampler(
      n_images, {.global_batch = n_images, .shuffle = false, .shards = n_shards});
  const auto drawn = sampler.batch(0);
  Tensor mine = torch::tensor(std::vector<std::int64_t>(drawn.begin(), drawn.end()));
  if (has_layers) mine = torch::arange(n_images).chunk(2)[rank];
  const Tensor my_x = x.index_select(0, mine).to(dtype);
  const Tensor my_labels = labels.index_select(0, mine);

  const auto has = [&](std::string_view layer) {
    if (has_layers) return option == layer || option == "both";
    return n_ranks > 1 || n_shards > 0;
  };
  if (has("sync")) lockstep::nn::convert_sync_batchnorm(net);
  const auto ddp = has("ddp") ? std::make_unique<lockstep::nn::DistributedDataParallel<Sequential>>(
                                    net,
                                    lockstep::nn::DistributedDataParallelOptions{
                                        .shards = n_shards, .shard_threads = at::get_num_threads()})
                              : nullptr;
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(1e-3));
  double loss = 0;
  const auto loss_of = [](const Tensor& scores, const Tensor& of, at::Reduction::Reduction how) {
    const auto of_loss = c10::promoteTypes(scores.scalar_type(), torch::kFloat32);
    return torch::cross_entropy_loss(scores.to(of_loss), of, /*weight=*/{}, how);
  };
  const auto step = [&] {
    sgd.zero_grad();
    if (n_shards > 0) {
      loss = ddp->run_shards(std::pair(my_x, my_labels), [&](Sequential& copy, const auto& part) {
        return loss_of(copy->forward(part.first), part.second, at::Reduction::Sum);
      });
    } else {
      const Tensor scores = ddp ? (*ddp)(my_x) : net->forward(my_x);
      const Tensor mean = loss_of(scores, my_labels, at::Reduction::Mean);
      mean.backward();
      loss = mean.item<double>();
    }
    sgd.step();
  };
  for (int i = 0; i < kUntimed; ++i) step();
  lockstep::barrier();
  const auto begin = Clock::now();
  for (int i = 0; i < n_steps; ++i) step();
  lockstep::barrier();
  const std::chrono::duration<double> seconds = Clock::now() - begin;
  const double mean = lockstep::all_reduce_value(loss, lockstep::ReduceOp::mean);
  if (rank == 0) {
    fmt::print("{{\"images_per_second\": {}, \"loss\": {}, \"bits\": \"{:016x}\"}}\n",
               static_cast<double>(n_images * n_steps) / seconds.count(), mean, bits_of(*net));
  }
  lockstep::destroy_dist();
  return 0;
}
