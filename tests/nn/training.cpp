#include "training.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace lockstep::nn::testing {
namespace {

double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, difference(a[i], b[i]));
  return worst;
}

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) {
    copies.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
  }
  return copies;
}

std::int64_t sum_of(const Shares& shares) {
  return std::accumulate(shares.begin(), shares.end(), std::int64_t{0});
}

}  // namespace

MakeOptimizer make_sgd(double rate, double weight_decay) {
  return [=](const std::vector<at::Tensor>& parameters) {
    return std::make_unique<torch::optim::SGD>(
        parameters, torch::optim::SGDOptions(rate).momentum(0.9).weight_decay(weight_decay));
  };
}

at::Tensor summed_cross_entropy(const at::Tensor& output, const at::Tensor& target) {
  namespace F = torch::nn::functional;
  return F::cross_entropy(output, target, F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

Trainee::Trainee(Training training, const Group& group)
    : net(training.make_net(static_cast<std::uint64_t>(1 + group.rank()))),
      training_(std::move(training)),
      group_(group) {
  net->to(training_.device);
  const bool is_parallel = !is_alone() || training_.n_replicas != 0;
  if (is_parallel && training_.synchronised == Synchronised::by_conversion) {
    convert_sync_batchnorm(net, group_);
  }
  optimizer = training_.make_optimizer(net->parameters());
  if (training_.n_replicas != 0) {
    replicas_.emplace(net, std::vector<at::Device>(training_.n_replicas, training_.device));
  } else if (!is_alone()) {
    DistributedDataParallelOptions options = training_.ddp;
    options.group = group_;
    model.emplace(net, options);
  }
}

at::Tensor Trainee::forward(const at::Tensor& x) {
  return replicas_ ? (*replicas_)(x) : model ? (*model)(x) : net->forward(x);
}

at::Tensor Trainee::share_of_rank(const at::Tensor& whole) const {
  return is_alone() ? whole : share_of(whole, shares_, group_.rank());
}

void Trainee::batches(int epoch) {
  for (int i = 0; i < training_.n_batches; ++i) {
    shares_ = training_.shares(epoch, i);
    const std::int64_t n_samples = sum_of(shares_);
    Random random(static_cast<std::uint64_t>(1000 * epoch + i));
    const Batch batch = training_.make_batch(random, n_samples);
    const auto rank = static_cast<std::size_t>(group_.rank());
    if (training_.joins && !is_alone() && shares_[rank] == 0) return;
    const at::Tensor x = share_of_rank(batch.input).to(training_.device).detach();
    x.requires_grad_(!training_.joins);
    const auto backward = [&] {
      std::optional<SyncBatchNormScope> scope;
      if (!is_alone() && training_.synchronised == Synchronised::by_scope) scope.emplace(group_);
      last_.output = forward(x);
      const at::Tensor target = share_of_rank(batch.target).to(training_.device);
      const at::Tensor loss =
          training_.loss(last_.output, target) * (group_.size() / static_cast<double>(n_samples));
      loss.backward();
      return loss;
    };
    if (i % training_.n_accumulated == 0) optimizer->zero_grad();
    if ((i + 1) % training_.n_accumulated == 0) {
      optimizer->step(backward);
    } else if (model) {
      const auto guard = model->no_sync();
      backward();
    } else {
      backward();
    }
    // The ranks' losses are scaled for the mean of their gradients.
    if (x.requires_grad()) last_.input_gradient = x.grad() / group_.size();
  }
}

void Trainee::epoch(int number) {
  if (training_.joins && model) {
    model->join([&] { batches(number); }, {.optimizers = {optimizer.get()}});
  } else {
    batches(number);
  }
  if (model && training_.synchronised != Synchronised::no) {
    assert_in_sync(*model, *optimizer, group_);
  }
  last_.state = copies_of(state());
  if (!training_.joins) {
    last_.gradients.clear();
    for (const auto& parameter : net->parameters()) last_.gradients.push_back(parameter.grad());
    last_.gradients = copies_of(last_.gradients);
    const at::NoGradGuard no_grad;
    Random random(7);
    net->eval();
    last_.evaluated =
        forward(training_.make_batch(random, sum_of(shares_)).input.to(training_.device));
    net->train();
  }
  epochs_.push_back(last_);
}

std::vector<at::Tensor> Trainee::state() const {
  std::vector<at::Tensor> all;
  for (const auto& parameter : net->parameters()) all.push_back(parameter.detach());
  for (const auto& buffer : net->buffers()) all.push_back(buffer);
  return all;
}

double Trainee::difference_from(const Trainee& alone) const {
  if (epochs_.size() != alone.epochs_.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < epochs_.size(); ++i) {
    const Epoch &got = epochs_[i], &expected = alone.epochs_[i];
    worst = std::max(worst, largest_difference(got.state, expected.state));
    if (training_.joins) continue;
    worst = std::max({worst, largest_difference(got.gradients, expected.gradients),
                      difference(got.output, share_of_rank(expected.output)),
                      difference(got.input_gradient, share_of_rank(expected.input_gradient)),
                      difference(got.evaluated, expected.evaluated)});
  }
  return worst;
}

void compare_with_one_rank(const Training& training, const test::Setting& setting,
                           const std::function<void(double difference)>& check) {
  const auto train = [&training](Trainee& trainee) {
    for (int epoch = 0; epoch < training.n_epochs; ++epoch) trainee.epoch(epoch);
  };
  Training of_one_rank = training;
  of_one_rank.n_replicas = 0;
  std::optional<Trainee> alone;
  const auto train_alone = [&] {
    alone.emplace(of_one_rank, Group());
    train(*alone);
  };
  // A process that has computed gradients cannot fork ranks that compute some.
  const bool forks = setting.form != test::Form::solo && setting.form != test::Form::threads &&
                     setting.form != test::Form::hosts;
  if (!forks) train_alone();
  test::run_as(
      setting,
      [&] {
        if (forks) train_alone();
        Trainee trainee(training, default_group());
        train(trainee);
        check(trainee.difference_from(*alone));
      },
      kWatchdog);
}

void expect_like_one_rank(const Training& training, const test::Setting& setting,
                          double tolerance) {
  compare_with_one_rank(training, setting, [&](double difference) {
    EXPECT_LE(difference, tolerance);
    const double largest = all_reduce_value(difference, ReduceOp::max);
    if (is_main_process()) ::testing::Test::RecordProperty("largest_difference", c10::str(largest));
  });
}

}  // namespace lockstep::nn::testing
