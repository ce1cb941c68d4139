#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <cstdlib>
#include <functional>
#include <string>

#include "helpers.hpp"
#include "support/expect.hpp"
#include "support/ranks.hpp"

namespace lockstep::nn {
namespace assert_in_sync_test {

using at::Tensor;
using testing::on_ranks;
using torch::nn::BatchNorm1d;
using torch::nn::Linear;
using torch::nn::Sequential;

struct Model {
  Sequential net{Linear(2, 3), BatchNorm1d(3)};
  torch::optim::Adam optimizer{net->parameters(), torch::optim::AdamOptions(0.1)};
  Model() {
    const at::NoGradGuard no_grad;
    net->register_buffer("codes", at::quantize_per_tensor(at::ones({2}), 1.0, 0, at::kQInt8));
    for (auto& parameter : net->parameters()) parameter.fill_(0.5);
    for (const Tensor& parameter : net->parameters()) {
      parameter.mutable_grad() = at::ones_like(parameter);
    }
    optimizer.step();
  }
};

struct Change {
  std::string expected;
  std::function<void(Model&)> apply;  // on rank 2 of 3
};

TEST(AssertInSyncTest, names_the_first_difference_on_every_rank) {
  const at::NoGradGuard no_grad;
  const std::vector<Change> changes{
      {"", [](Model&) {}},
      {"parameter 0.bias of rank 2 and rank 0 differ: ",
       [](Model& model) {
         const at::NoGradGuard guard;
         Tensor bias = model.net->named_parameters()["0.bias"];
         bias[2] += 1e-6;
       }},
      {"buffer 1.running_var of rank 2",
       [](Model& model) { model.net->named_buffers()["1.running_var"].mul_(2); }},
      {"buffer codes of rank 2",  // the same bytes
       [](Model& model) {
         model.net->named_buffers()["codes"].set_data(
             at::quantize_per_tensor(at::full({2}, 2.0), 2.0, 0, at::kQInt8));
       }},
      {"the options of the optimizer's parameter group 0 of rank 2 and rank 0 differ: ",
       [](Model& model) { model.optimizer.param_groups()[0].options().set_lr(0.2); }},
      {"the optimizer's state for parameter 1.weight of rank 2", [](Model& model) {
         const at::NoGradGuard guard;
         for (const Tensor& parameter : model.net->parameters()) {
           parameter.mutable_grad() = Tensor();
         }
         Tensor weight = model.net->named_parameters()["1.weight"];
         const Tensor before = weight.clone();
         weight.mutable_grad() = at::ones_like(weight);
         model.optimizer.step();
         weight.copy_(before);
       }}};
  for (const Change& change : changes) {
    on_ranks(3, [&](int rank) {
      Model model;
      if (rank == 2) change.apply(model);
      try {
        assert_in_sync(model.net, model.optimizer);
        EXPECT_EQ(change.expected, "") << "no error";
      } catch (const MismatchError& error) {
        EXPECT_EQ(error.text().find(change.expected), 0U) << error.text();
        EXPECT_FALSE(change.expected.empty()) << error.text();
        test::expect_contains(error.what(), "assert_in_sync_test.cpp");
      }
      barrier();  // the group lives
    });
  }
}

TEST(AssertInSyncTest, takes_modules_holders_pointers_and_wrappers) {
  on_ranks(2, [](int rank) {
    Linear net(2, 2);
    DistributedDataParallel model(net);
    const torch::nn::Module& module = *net;
    assert_in_sync(module);
    assert_in_sync(net);
    assert_in_sync(net.ptr());
    assert_in_sync(model);
    Sequential other(Linear(2, rank + 1));
    EXPECT_THROW(assert_in_sync(other), MismatchError);
    Sequential longer;
    longer->push_back(Linear(2, 2));
    if (rank == 1) longer->push_back(BatchNorm1d(2));
    test::expect_contains(test::thrown<MismatchError>([&] { assert_in_sync(longer); }),
                          "parameter 0.weight");
  });
}

/// What a program does to a parameter on one rank, in place, no message of the training shows.
TEST(AssertInSyncTest, the_wrapper_does_it_where_everything_is_checked) {
  ::setenv("LOCKSTEP_CHECK", "full", 1);
  const auto statuses = test::run_processes(2, [] {
    Linear net(2, 2);
    DistributedDataParallel model(net);
    const Tensor x = at::ones({1, 2});
    if (get_rank() == 1) {
      const at::NoGradGuard no_grad;
      net->weight.mul_(2);
    }
    test::expect_contains(test::thrown<MismatchError>([&] {
                            for (int i = 0; i < 101; ++i) model(x).sum().backward();
                          }),
                          "parameter weight of rank 1");
  });
  ::unsetenv("LOCKSTEP_CHECK");
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

}  // namespace assert_in_sync_test
}  // namespace lockstep::nn
