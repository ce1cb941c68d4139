#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/dist.hpp>
#include <lockstep/nn.hpp>

#include <functional>
#include <initializer_list>
#include <memory>
#include <vector>

#include "helpers.hpp"

// What docs/howto/training_recipes.md says about each kind of training program: over 1 to 4 ranks
// with unequal shares of the batch it computes what one rank computes.
namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::difference, testing::on_ranks, testing::Random, testing::share_of, testing::Shares;
using torch::nn::BatchNorm1d, torch::nn::Linear, torch::nn::Sequential, torch::nn::Tanh;

constexpr std::int64_t kBatch = 12;

Sequential net_of(std::uint64_t seed, std::int64_t n_in = 3, std::int64_t n_out = 2) {
  Sequential net(Linear(n_in, 4), BatchNorm1d(4), Tanh(), Linear(4, n_out));
  net->to(at::kDouble);
  const at::NoGradGuard no_grad;
  Random random(seed);
  for (Tensor& parameter : net->parameters()) {
    parameter.copy_(random.normal(parameter.sizes()));
  }
  convert_sync_batchnorm(net);
  return net;
}

/// A rank's rows of the batches.
struct Data {
  Shares shares;
  int rank;
  Tensor batch(int step, std::int64_t width = 3) const {
    return share_of(Random(100 + static_cast<std::uint64_t>(step)).normal({kBatch, width}), shares,
                    rank);
  }
  Tensor target(int step) const {
    return share_of(Random(200 + static_cast<std::uint64_t>(step)).normal({kBatch, 2}), shares,
                    rank);
  }
};

/// The mean over all ranks' samples, as each rank computes its part of it: unequal shares.
Tensor mean_loss(const Tensor& output, const Tensor& target, std::int64_t n_samples = kBatch) {
  return (output - target).pow(2).sum() / static_cast<double>(n_samples) * get_world_size();
}

template <class Module>
void take_step(DistributedDataParallel<Module>& model, torch::optim::Optimizer& optimizer,
               const Data& data, int step) {
  optimizer.zero_grad();
  mean_loss(model(data.batch(step)), data.target(step)).backward();
  optimizer.step();
}

/// The parameters and buffers of the modules, and what else is to be compared.
std::vector<Tensor> state_of(std::initializer_list<const torch::nn::Module*> modules,
                             std::vector<Tensor> all = {}) {
  for (const auto* const module : modules) {
    for (const Tensor& tensor : module->parameters()) all.push_back(tensor.detach());
    for (const Tensor& tensor : module->buffers()) all.push_back(tensor);
  }
  return all;
}

using Program = std::function<std::vector<Tensor>(const Data&)>;

void expect_one_rank(const Program& program) {
  const auto alone = program({{kBatch}, 0});
  for (const Shares& shares : {Shares{12}, Shares{5, 7}, Shares{3, 5, 4}, Shares{1, 4, 5, 2}}) {
    on_ranks(static_cast<int>(shares.size()), [&](int rank) {
      const auto mine = program({shares, rank});
      ASSERT_EQ(mine.size(), alone.size());
      for (std::size_t i = 0; i < mine.size(); ++i) {
        EXPECT_LE(difference(mine[i], alone[i]), 1e-9) << i << " of rank " << rank;
      }
    });
  }
}

TEST(TrainingProgramsTest, clips_by_the_norm_of_all_gradients) {
  expect_one_rank([](const Data& data) {
    auto net = net_of(1);
    DistributedDataParallel model(net);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    std::vector<Tensor> all;
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      mean_loss(model(data.batch(step)), data.target(step)).backward();
      const double norm = torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
      all.push_back(at::scalar_tensor(norm));
      optimizer.step();
    }
    return state_of({net.get()}, all);
  });
}

TEST(TrainingProgramsTest, accumulates_gradients) {
  expect_one_rank([](const Data& data) {
    auto net = net_of(1);
    DistributedDataParallel model(net);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      for (const int part : {0, 1}) {
        const std::unique_ptr<NoSync> no_sync(part == 1 ? nullptr : new NoSync(model.no_sync()));
        const int batch = 2 * step + part;
        mean_loss(model(data.batch(batch)), data.target(batch), 2 * kBatch).backward();
      }
      optimizer.step();
    }
    return state_of({net.get()});
  });
}

TEST(TrainingProgramsTest, keeps_an_average_of_the_model) {
  expect_one_rank([](const Data& data) {
    auto net = net_of(1);
    DistributedDataParallel model(net);
    const auto average = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      take_step(model, optimizer, data, step);
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < net->parameters().size(); ++i) {
        average->parameters()[i].lerp_(net->parameters()[i], 0.1);
      }
      for (std::size_t i = 0; i < net->buffers().size(); ++i) {
        average->buffers()[i].copy_(net->buffers()[i]);
      }
    }
    assert_in_sync(*average);
    return state_of({average.get()});
  });
}

TEST(TrainingProgramsTest, thaws_a_layer) {
  expect_one_rank([](const Data& data) {
    auto net = net_of(1);
    auto first = std::dynamic_pointer_cast<torch::nn::LinearImpl>(net->ptr(0));
    for (Tensor& parameter : first->parameters()) parameter.requires_grad_(false);
    DistributedDataParallel model(net);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        for (Tensor& parameter : first->parameters()) parameter.requires_grad_(true);
      }
      take_step(model, optimizer, data, step);
    }
    return state_of({net.get()});
  });
}

TEST(TrainingProgramsTest, evaluates_in_the_middle_of_an_epoch) {
  expect_one_rank([](const Data& data) {
    auto net = net_of(1);
    DistributedDataParallel model(net);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    std::vector<Tensor> all;
    for (int step = 0; step < 4; ++step) {
      take_step(model, optimizer, data, step);
      if (step != 1) continue;
      const at::NoGradGuard no_grad;
      net->eval();
      Tensor error = (model(data.batch(9)) - data.target(9)).pow(2).sum();
      all_reduce(error);
      all.push_back(error);
      net->train();
    }
    return state_of({net.get()}, all);
  });
}

TEST(TrainingProgramsTest, trains_two_models_against_each_other) {
  expect_one_rank([](const Data& data) {
    auto generator = net_of(1, 3, 2), critic = net_of(2, 2, 1);
    DistributedDataParallel generates(generator), judges(critic);
    // With the usual eps, 1e-8, Adam amplifies the rounding of gradients that are nearly zero.
    const auto options = torch::optim::AdamOptions(0.01).eps(1e-4);
    torch::optim::Adam of_generator(generator->parameters(), options);
    torch::optim::Adam of_critic(critic->parameters(), options);
    const auto mean = [](const Tensor& scores) {
      return scores.sum() / static_cast<double>(kBatch) * get_world_size();
    };
    for (int step = 0; step < 3; ++step) {
      const Tensor real = data.target(step);
      // All samples in one forward of the critic: then one backward averages its gradients.
      const Tensor fake = generates(data.batch(step)).detach();
      const auto scores =
          judges(at::cat({real, fake})).split_with_sizes({real.size(0), fake.size(0)});
      of_critic.zero_grad();
      (mean(at::softplus(-scores[0])) + mean(at::softplus(scores[1]))).backward();
      of_critic.step();

      of_generator.zero_grad();
      // Through the critic itself: its gradients of this loss are dropped.
      for (Tensor& parameter : critic->parameters()) parameter.requires_grad_(false);
      mean(at::softplus(-critic->forward(generates(data.batch(step))))).backward();
      for (Tensor& parameter : critic->parameters()) parameter.requires_grad_(true);
      of_generator.step();
    }
    return state_of({generator.get(), critic.get()});
  });
}

TEST(TrainingProgramsTest, penalises_gradients) {
  expect_one_rank([](const Data& data) {
    auto net = net_of(1);
    DistributedDataParallel model(net);
    torch::optim::SGD optimizer(net->parameters(), 0.05);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const Tensor x = data.batch(step).clone().requires_grad_();
      const Tensor output = model(x);
      const Tensor of_x = torch::autograd::grad({output.sum()}, {x}, {}, /*retain_graph=*/true,
                                                /*create_graph=*/true)[0];
      const Tensor penalty = of_x.pow(2).sum() / static_cast<double>(kBatch) * get_world_size();
      (mean_loss(output, data.target(step)) + 0.1 * penalty).backward();
      optimizer.step();
    }
    return state_of({net.get()});
  });
}

}  // namespace
}  // namespace lockstep::nn
