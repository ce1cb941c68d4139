// Of the libtorch layer: collectives that autograd knows, in a contrastive loss over the embeddings
// of all ranks, and in a pair of layers of which each rank has a part.
#include <torch/torch.h>

#include <cstdio>

#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>

namespace nn = lockstep::nn;
using torch::Tensor;

// Two views of each sample attract each other and repel those of all other samples.
Tensor contrastive_loss(const Tensor& first, const Tensor& second) {
  const Tensor scores = first.matmul(second.t());
  return torch::nn::functional::cross_entropy(scores, torch::arange(first.size(0)));
}

// Each rank embeds its samples; the loss compares those of all ranks, and is the same on all.
void compare_with_the_samples_of_all_ranks() {
  torch::manual_seed(1);
  torch::nn::Linear encoder(8, 4);
  const Tensor views = torch::randn({2, 6, 8});  // of the whole batch: 6 samples
  const auto own = [&](int view) {
    return views[view].tensor_split(lockstep::get_world_size())[lockstep::get_rank()];
  };
  nn::DistributedDataParallel model(encoder);
  const auto embed = [&](int view) {
    return torch::cat(nn::functional::all_gather(model(own(view))));
  };
  const Tensor loss = contrastive_loss(embed(0), embed(1));
  loss.backward();
  std::printf("contrastive: loss %.4f, the gradient's norm is %.4f\n", loss.item<double>(),
              encoder->weight.grad().norm().item<double>());
}

// The first layer is cut by its outputs and the second by its inputs, so that one sum remains.
void cut_two_layers() {
  torch::manual_seed(2);
  const int n = lockstep::get_world_size(), rank = lockstep::get_rank();
  const Tensor x = torch::randn({3, 8}), up = torch::randn({16, 8}), down = torch::randn({8, 16});
  const Tensor own_up = up.tensor_split(n, 0)[rank].clone().requires_grad_();
  const Tensor own_down = down.tensor_split(n, 1)[rank].clone().requires_grad_();
  const Tensor hidden = torch::relu(nn::functional::replicate(x).matmul(own_up.t()));
  const Tensor y = nn::functional::reduce_replicated(hidden.matmul(own_down.t()));
  y.square().sum().backward();
  std::printf("two layers: %lld of 16 units here, the output's norm is %.4f\n",
              static_cast<long long>(own_up.size(0)), y.norm().item<double>());
}

int main() {
  lockstep::init_dist();
  compare_with_the_samples_of_all_ranks();
  cut_two_layers();
}
