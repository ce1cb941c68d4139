#pragma once

#include <torch/torch.h>

#include <functional>
#include <lockstep/nn.hpp>
#include <memory>
#include <optional>
#include <vector>

#include "helpers.hpp"
#include "support/ranks.hpp"

/// The claim of the library: ranks with their shares of each batch train the network that one rank
/// trains with the whole batches.
namespace lockstep::nn::testing {

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>;

MakeOptimizer make_sgd(double rate, double weight_decay = 0);

struct Batch {
  at::Tensor input, target;
};

at::Tensor summed_cross_entropy(const at::Tensor& output, const at::Tensor& target);

/// How the ranks' BatchNorms become those of all ranks.
enum class Synchronised { by_conversion, by_scope, no };

struct Training {
  /// The parameters follow from `seed`; only those of rank 0 are the ones that one rank has.
  std::function<torch::nn::Sequential(std::uint64_t seed)> make_net;
  MakeOptimizer make_optimizer = make_sgd(0.05);
  std::function<Batch(Random&, std::int64_t n_samples)> make_batch;
  /// Summed over the samples.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)> loss;
  std::function<Shares(int epoch, int batch)> shares;
  int n_epochs = 1;
  int n_batches = 1;      ///< of an epoch
  int n_accumulated = 1;  ///< batches of a step
  /// A rank whose share is 0 has ended its epoch. Otherwise it takes part without samples.
  bool joins = false;
  Synchronised synchronised = Synchronised::by_conversion;
  DistributedDataParallelOptions ddp = {};
  /// Instead of ranks, replicas of one rank; 0: none.
  std::size_t n_replicas = 0;
  at::Device device = at::kCPU;
};

/// One rank of a training, or the one rank that has the whole batches, if its group has no other.
class Trainee {
 public:
  Trainee(Training training, const Group& group);

  void epoch(int number);
  /// What `epoch` runs in DistributedDataParallel::join where the training joins.
  void batches(int epoch);
  /// Parameters and buffers, as they are.
  std::vector<at::Tensor> state() const;
  /// Largest difference of anything from `alone`, which has the whole batches: of parameters and
  /// buffers, and unless the training joins, of the last batch's gradients, input gradient, output
  /// and output in evaluation.
  double difference_from(const Trainee& alone) const;

  torch::nn::Sequential net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::optional<DistributedDataParallel<torch::nn::Sequential>> model;

 private:
  struct Epoch {
    std::vector<at::Tensor> state, gradients;
    /// Of this rank's samples; in evaluation of a whole batch.
    at::Tensor output, input_gradient, evaluated;
  };
  bool is_alone() const { return group_.size() == 1; }
  at::Tensor forward(const at::Tensor& x);
  at::Tensor share_of_rank(const at::Tensor& whole) const;

  Training training_;
  Group group_;
  std::optional<DataParallelWithCallback<torch::nn::Sequential>> replicas_;
  Shares shares_;  ///< of the last batch
  Epoch last_;
  std::vector<Epoch> epochs_;
};

/// Trains on one rank and over the ranks of `setting`, and has each of these check its difference.
void compare_with_one_rank(const Training& training, const test::Setting& setting,
                           const std::function<void(double difference)>& check);
void expect_like_one_rank(const Training& training, const test::Setting& setting, double tolerance);

}  // namespace lockstep::nn::testing
