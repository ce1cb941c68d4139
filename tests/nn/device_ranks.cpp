#include "device_ranks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>
#include <lockstep/nn.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "helpers.hpp"
#include "support/temporary_folder.hpp"
#include "training.hpp"

namespace lockstep::nn::device_ranks {
namespace {

using testing::channels_last;
using testing::difference;
using testing::outcome_of;
using testing::Random;
using testing::share_of;
using testing::Shares;

using at::Tensor;

/// Absolute, against float64 on the same values, which are about 1. A 16-bit result is rounded
/// once; what 16-bit activations leave in parameters and statistics is float32.
double tolerance_of(at::ScalarType type) {
  if (type == at::kDouble) return 1e-12;
  if (type == at::kFloat) return 1e-5;
  return 4 * (type == at::kHalf ? 0x1p-10 : 0x1p-7);
}

std::vector<Shares> all_shares(int n_ranks) {
  if (n_ranks == 1) return {{6}};
  Shares even(static_cast<std::size_t>(n_ranks), 2), uneven = even, empty = even;
  uneven[0] = 5;
  empty.back() = 0;
  return {std::move(even), std::move(uneven), std::move(empty)};
}

std::int64_t sum_of(const Shares& shares) {
  std::int64_t sum = 0;
  for (const std::int64_t share : shares) sum += share;
  return sum;
}

/// Operations on tensors of the device.
std::string operations_differ(const at::Device& device) {
  const int n = get_world_size();
  const auto of_rank = [&](int rank) {
    return Random(static_cast<std::uint64_t>(rank)).normal({4, 3}).to(device);
  };
  Tensor sum = of_rank(0);
  for (int rank = 1; rank < n; ++rank) sum += of_rank(rank);
  const Tensor mine = of_rank(get_rank());
  Tensor strided = mine.t().clone().t();
  all_reduce(strided);
  Tensor posted = mine.clone(), of_last = mine.clone();
  all_reduce_async(posted).wait();
  broadcast(of_last, n - 1);
  std::vector<std::pair<Tensor, Tensor>> outcomes{
      {strided, sum}, {posted, sum}, {of_last, of_rank(n - 1)}};
  const std::vector<Tensor> gathered = all_gather(mine);
  for (int rank = 0; rank < n; ++rank) {
    outcomes.emplace_back(gathered[static_cast<std::size_t>(rank)], of_rank(rank));
  }
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    const auto& [got, expected] = outcomes[i];
    if (got.device() != device) return fmt::format("result {} is {}", i, got.toString());
    const double error = difference(got, expected);
    if (!(error <= 1e-12)) return fmt::format("result {} by {}", i, error);
  }
  return {};
}

/// A gradient penalty through a batch normalisation, over rows that all ranks gather.
std::string penalty_differs(const at::Device& device) {
  const Shares shares(static_cast<std::size_t>(get_world_size()), 3);
  const Tensor batch = Random(3).normal({sum_of(shares), 4}).to(device);
  const auto gradients = [&](const Group& group, const Tensor& part) {
    SyncBatchNorm1d bn(SyncBatchNormOptions(4).group(group));
    bn->to(device, at::kDouble);
    const Tensor x = part.detach().clone().requires_grad_();
    const Tensor all = at::cat(functional::all_gather(bn->forward(x).tanh(), group));
    const Tensor loss = all.matmul(all.t()).pow(2).sum() / group.size();
    const Tensor of_x = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true)[0];
    of_x.pow(2).sum().backward();
    return std::vector<Tensor>{of_x, x.grad()};
  };
  const auto expected = gradients(Group(), batch);
  const auto mine = gradients(default_group(), share_of(batch, shares, get_rank()));
  for (const std::size_t order : {0U, 1U}) {
    if (mine[order].device() != device) return fmt::format("one is {}", mine[order].toString());
    const Tensor here = share_of(expected[order], shares, get_rank());
    const double error = difference(mine[order], here) / testing::largest(here);
    if (!(error <= 1e-10)) return fmt::format("gradients of order {} by {}", order + 1, error);
  }
  return {};
}

/// Steps by a scope and DistributedDataParallel; after the second the state is saved, erased and
/// loaded.
std::string training_differs(const at::Device& device) {
  testing::Training training;
  training.make_net = [](std::uint64_t seed) {
    torch::nn::Sequential net(torch::nn::Conv2d(5, 4, 3), torch::nn::BatchNorm2d(4),
                              torch::nn::ReLU(), torch::nn::Conv2d(4, 3, 3));
    net->to(at::kDouble);
    const at::NoGradGuard no_grad;
    Random random(seed);
    for (auto& p : net->parameters()) p.copy_(random.normal(p.sizes()) * 0.2);
    return net;
  };
  training.make_optimizer = testing::make_sgd(0.1);
  training.make_batch = [](Random& random, std::int64_t n) {
    return testing::Batch{random.normal({n, 5, 8, 8}), at::zeros({n, 3, 4, 4}, at::kDouble)};
  };
  training.loss = [](const Tensor& y, const Tensor& target) {
    return (y - target).square().sum() / 48;
  };
  const Shares shares(static_cast<std::size_t>(get_world_size()), 3);
  training.shares = [&](int /*epoch*/, int /*batch*/) { return shares; };
  training.n_batches = 2;
  training.synchronised = testing::Synchronised::by_scope;
  training.ddp.bucket_cap_mb = 0;  // each parameter has a bucket of its own
  training.device = device;
  testing::Trainee alone(training, Group()), trainee(training, default_group());
  const test::TemporaryFolder folder;
  const std::string path = folder / "training.pt";
  for (const int epoch : {0, 1}) {
    alone.epoch(epoch);
    trainee.epoch(epoch);
    if (epoch == 1) break;
    save_training(path, {trainee.net, *trainee.optimizer});
    {
      const at::NoGradGuard no_gradients;
      for (Tensor& tensor : trainee.state()) tensor.zero_();
    }
    trainee.optimizer->state().clear();
    load_training(path, {trainee.net, *trainee.optimizer});
  }
  const double error = trainee.difference_from(alone);
  if (!(error <= 1e-10)) return fmt::format("by {}", error);
  for (const Tensor& tensor : trainee.state()) {
    if (tensor.device() != device) return fmt::format("a tensor is {}", tensor.toString());
  }
  return {};
}

}  // namespace

std::string layer_differs(const LayerCase& c, const at::Device& device) {
  const auto state = c.type == at::kDouble ? at::kDouble : at::kFloat;
  const std::int64_t n = sum_of(c.shares);
  Tensor x = (Random(1).normal({n, 5, 4, 3}) + 0.5).to(device, c.type);
  Tensor dy = Random(2).normal({n, 5, 4, 3}).to(device, c.type);
  if (c.is_channels_last) {
    x = channels_last(x);
    dy = channels_last(dy);
  }
  torch::nn::BatchNorm2d whole(5);
  SyncBatchNorm2d ours(5);
  whole->to(device, at::kDouble);
  ours->to(device, state);
  const std::vector<Tensor> expected = outcome_of(whole, x.to(at::kDouble), dy.to(at::kDouble));
  const Tensor mine = share_of(x, c.shares, get_rank());
  std::vector<Tensor> got = outcome_of(ours, mine, share_of(dy, c.shares, get_rank()));
  for (const std::size_t of_parameters : {2, 3}) {
    Tensor on_cpu = got[of_parameters].to(at::kCPU);
    all_reduce(on_cpu);
    got[of_parameters] = on_cpu.to(device);
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool is_activation = i < 2;
    const Tensor here = is_activation ? share_of(expected[i], c.shares, get_rank()) : expected[i];
    const double error = difference(got[i], here);
    double tolerance = is_activation ? tolerance_of(c.type) : 10 * tolerance_of(state);
    // ATen's kernels round partial sums to the type of the activations there.
    const bool is_gradient = i == 2 || i == 3;
    if (is_gradient && device.is_cuda() && !c.is_channels_last) {
      tolerance = std::max(tolerance, 4 * tolerance_of(c.type));
    }
    if (!(error <= tolerance)) return fmt::format("tensor {} by {}", i, error);
    if (got[i].device() != device || got[i].scalar_type() != (is_activation ? c.type : state) ||
        (is_activation && got[i].strides() != mine.strides())) {
      return fmt::format("tensor {} is {}", i, got[i].toString());
    }
  }
  return {};
}

int run(const std::string& backend, const std::string& device_name) {
  const at::Device device = at::empty({0}, at::Device(device_name)).device();  // with its index
  init_dist({.backend = backend});
  int n_right = 0, n_wrong = 0;
  const auto report = [&](const std::string& name, const std::string& error) {
    (error.empty() ? n_right : n_wrong) += 1;
    if (!error.empty()) std::printf("rank %d: %s: %s\n", get_rank(), name.c_str(), error.c_str());
  };
  for (const auto type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const bool is_channels_last : {false, true}) {
      for (const Shares& shares : all_shares(get_world_size())) {
        report(fmt::format("SyncBatchNorm {}{}, samples {}", c10::toString(type),
                           is_channels_last ? " channels-last" : "", fmt::join(shares, " + ")),
               layer_differs({type, is_channels_last, shares}, device));
      }
    }
  }
  report("operations on tensors", operations_differ(device));
  report("a gradient penalty over gathered rows", penalty_differs(device));
  report("scope, DistributedDataParallel and checkpoint", training_differs(device));
  const int n_wrong_anywhere = all_reduce_value(n_wrong);
  if (is_main_process()) std::printf("%d right over %s\n", n_right, backend.c_str());
  destroy_dist();
  return n_wrong_anywhere == 0 ? 0 : 1;
}

}  // namespace lockstep::nn::device_ranks
