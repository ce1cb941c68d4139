#include "device_ranks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>
#include <lockstep/nn.hpp>

#include <cstdio>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "helpers.hpp"

namespace lockstep::nn::device_ranks {
namespace {

using testing::channels_last;
using testing::difference;
using testing::outcome_of;
using testing::Random;
using testing::share_of;
using testing::Shares;

using at::Tensor;

struct Case {
  at::ScalarType type;
  bool is_channels_last;
  Shares shares;  // samples of each rank
};

/// Absolute, for values about 1; a 16-bit result may be the next number: 2^-7 at bf16.
double tolerance_of(at::ScalarType type) {
  return type == at::kDouble ? 1e-12 : type == at::kFloat ? 1e-5 : 4e-2;
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

/// What differs; empty: nothing.
std::string layer_differs(const Case& c, const at::Device& device) {
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
  whole->to(device, state);
  ours->to(device, state);
  const std::vector<Tensor> expected = outcome_of(whole, x, dy);
  std::vector<Tensor> got =
      outcome_of(ours, share_of(x, c.shares, get_rank()), share_of(dy, c.shares, get_rank()));
  for (const std::size_t of_parameters : {2, 3}) {
    Tensor on_cpu = got[of_parameters].to(at::kCPU);
    all_reduce(on_cpu);
    got[of_parameters] = on_cpu.to(device);
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    const Tensor here = i < 2 ? share_of(expected[i], c.shares, get_rank()) : expected[i];
    const double error = difference(got[i], here);
    if (!(error <= tolerance_of(c.type))) return fmt::format("tensor {} by {}", i, error);
    if (got[i].device() != device || got[i].scalar_type() != expected[i].scalar_type()) {
      return fmt::format("tensor {} is {}", i, got[i].toString());
    }
  }
  return {};
}

/// A model with BatchNorm, by a scope and DistributedDataParallel.
std::string model_differs(const at::Device& device) {
  const Shares shares(static_cast<std::size_t>(get_world_size()), 3);
  const Tensor x = Random(1).normal({sum_of(shares), 5, 6, 6}).to(device);
  torch::nn::Sequential whole(torch::nn::Conv2d(5, 3, 3), torch::nn::BatchNorm2d(3));
  whole->to(device, at::kDouble);
  std::stringstream saved;
  torch::save(whole, saved);
  torch::nn::Sequential net(torch::nn::Conv2d(5, 3, 3), torch::nn::BatchNorm2d(3));
  saved.seekg(0);
  torch::load(net, saved);
  net->to(device, at::kDouble);
  DistributedDataParallel model(net);  // rank 0's parameters, on every rank
  for (const auto& item : net->named_parameters()) {
    const at::NoGradGuard no_grad;
    whole->named_parameters()[item.key()].copy_(*item);
  }
  whole->forward(x).square().mean().backward();
  const SyncBatchNormScope scope;
  model(share_of(x, shares, get_rank())).square().mean().backward();
  for (const auto& item : net->named_parameters()) {
    const double error = difference(item->grad(), whole->named_parameters()[item.key()].grad());
    if (!(error <= 1e-12)) return fmt::format("gradient of {} by {}", item.key(), error);
    if (item->grad().device() != device) return "device of gradient of " + item.key();
  }
  return {};
}

}  // namespace

int run(const std::string& backend, const std::string& device_name) {
  const at::Device device(device_name);
  init_dist({.backend = backend});
  int n_right = 0, n_wrong = 0;
  const auto report = [&](const std::string& name, const std::string& error) {
    (error.empty() ? n_right : n_wrong) += 1;
    if (!error.empty()) std::printf("rank %d: %s: %s\n", get_rank(), name.c_str(), error.c_str());
  };
  for (const auto type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    // libtorch's BatchNorm, with which ours is compared, has no 16-bit types on a CPU before 2.
    if (device.is_cpu() && c10::elementSize(type) == 2) continue;
    for (const bool is_channels_last : {false, true}) {
      for (const Shares& shares : all_shares(get_world_size())) {
        report(fmt::format("SyncBatchNorm {}{}, samples {}", c10::toString(type),
                           is_channels_last ? " channels-last" : "", fmt::join(shares, " + ")),
               layer_differs({type, is_channels_last, shares}, device));
      }
    }
  }
  report("scope and DistributedDataParallel", model_differs(device));
  const int n_wrong_anywhere = all_reduce_value(n_wrong);
  if (is_main_process()) std::printf("%d right over %s\n", n_right, backend.c_str());
  destroy_dist();
  return n_wrong_anywhere == 0 ? 0 : 1;
}

}  // namespace lockstep::nn::device_ranks
