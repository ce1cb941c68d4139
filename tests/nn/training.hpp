#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <lockstep/nn.hpp>
#include <string>
#include <vector>

#include "helpers.hpp"

/// The claim of the library as one function: train, and compare with one rank.
namespace lockstep::nn::testing {

inline constexpr int kSteps = 50;

inline torch::nn::Sequential make_net(std::uint64_t seed) {
  using namespace torch::nn;
  Sequential net(Conv2d(Conv2dOptions(1, 6, 3).padding(1)), BatchNorm2d(6), ReLU(),
                 Conv2d(Conv2dOptions(6, 8, 3).stride(2).bias(false)), BatchNorm2d(8), ReLU(),
                 Flatten(), Linear(72, 16), BatchNorm1d(16), ReLU(), Linear(16, 10));
  net->to(at::kDouble);
  const at::NoGradGuard no_grad;
  Random random(seed);
  for (auto& parameter : net->parameters()) parameter.copy_(random.normal(parameter.sizes()) * 0.2);
  return net;
}

/// Parameters and buffers after kSteps of SGD on batches that are cut into the ranks' shares.
inline std::vector<at::Tensor> train(const Group& group, const std::vector<std::int64_t>& shares,
                                     bool sync_bn) {
  // Only rank 0 starts from the right parameters: the others get them from it.
  auto net = make_net(/*seed=*/static_cast<std::uint64_t>(1 + group.rank()));
  if (sync_bn) convert_sync_batchnorm(net, group);
  DistributedDataParallel model(
      net, {.group = group, .bucket_cap_mb = 0.002, .first_bucket_cap_mb = 0.0005});
  torch::optim::SGD optimizer(net->parameters(),
                              torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-3));
  Random random(99);
  std::int64_t n_samples = 0;
  for (const auto share : shares) n_samples += share;
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor images = random.normal({n_samples, 1, 8, 8}) * 2 + 1;
    const at::Tensor labels = random.classes(10, n_samples);
    const at::Tensor logits = model(share_of(images, shares, group.rank()));
    const at::Tensor sum = torch::nn::functional::cross_entropy(
        logits, share_of(labels, shares, group.rank()),
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
    optimizer.zero_grad();
    (sum * (static_cast<double>(group.size()) / static_cast<double>(n_samples))).backward();
    optimizer.step();
  }
  std::vector<at::Tensor> state;
  for (const auto& parameter : net->parameters()) state.push_back(parameter.detach());
  for (const auto& buffer : net->buffers()) state.push_back(buffer);
  return state;
}

/// Largest difference of any parameter or buffer from the training on one rank.
inline double difference_from_one_rank(const Group& group, const std::vector<std::int64_t>& shares,
                                       bool sync_bn) {
  const auto got = train(group, shares, sync_bn);
  std::int64_t n_samples = 0;
  for (const auto share : shares) n_samples += share;
  const auto expected = train(Group(), {n_samples}, /*sync_bn=*/false);
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    worst = std::max(worst, difference(got[i], expected[i]));
  }
  return worst;
}

}  // namespace lockstep::nn::testing
