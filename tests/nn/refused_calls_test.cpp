// A call of the libtorch layer that one rank refuses, and that all refuse.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "helpers.hpp"
#include "support/expect.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
using test::expect_contains;
using test::thrown;
using testing::on_ranks;

struct Refusable {
  std::string operation;
  std::function<void(const Group&)> made, refused;
};

Tensor bad() { return torch::zeros({2, 2}).to_sparse(); }
std::vector<Tensor> parts(const Group& group, std::int64_t n = 2) {
  return std::vector<Tensor>(static_cast<std::size_t>(group.size()), torch::ones({n}));
}

std::vector<Refusable> refusable_calls() {
  std::vector<Refusable> calls;
  const auto add = [&](std::string operation, std::function<void(const Group&)> made,
                       std::function<void(const Group&)> refused) {
    calls.push_back({std::move(operation), std::move(made), std::move(refused)});
  };
  add(
      "all_reduce",
      [](const Group& g) {
        Tensor x = torch::ones({3});
        all_reduce(x, ReduceOp::sum, g);
      },
      [](const Group& g) {
        Tensor x = bad();
        all_reduce(x, ReduceOp::sum, g);
      });
  add(
      "reduce",
      [](const Group& g) {
        Tensor x = torch::ones({3});
        reduce(x, 0, ReduceOp::sum, g);
      },
      [](const Group& g) {
        Tensor x = bad();
        reduce(x, 0, ReduceOp::sum, g);
      });
  add(
      "broadcast",
      [](const Group& g) {
        Tensor x = torch::ones({3});
        broadcast(x, 0, g);
      },
      [](const Group& g) {
        Tensor x;
        broadcast(x, 0, g);
      });
  add(
      "all_gather", [](const Group& g) { (void)all_gather(torch::ones({3}), g); },
      [](const Group& g) { (void)all_gather(bad(), g); });
  add(
      "gather", [](const Group& g) { (void)gather(torch::ones({3}), 0, g); },
      [](const Group& g) { (void)gather(bad(), 0, g); });
  add(
      "scatter",
      [](const Group& g) {
        Tensor x = torch::ones({2});
        scatter(x, parts(g), 0, g);
      },
      [](const Group& g) {
        Tensor x = bad();
        scatter(x, parts(g), 0, g);
      });
  add(
      "reduce_scatter",
      [](const Group& g) {
        Tensor x = torch::ones({2});
        reduce_scatter(x, parts(g), ReduceOp::sum, g);
      },
      [](const Group& g) {
        Tensor x = torch::ones({2});
        reduce_scatter(x, parts(g, 3), ReduceOp::sum, g);
      });
  add(
      "all_to_all", [](const Group& g) { (void)all_to_all(parts(g), g); },
      [](const Group& g) { (void)all_to_all(std::vector<Tensor>{}, g); });
  add(
      "all_reduce",
      [](const Group& g) { all_reduce_async(torch::ones({3}), ReduceOp::sum, g).wait(); },
      [](const Group& g) { (void)all_reduce_async(bad(), ReduceOp::sum, g); });
  add(
      "all_reduce_params",
      [](const Group& g) { all_reduce_params({torch::ones({3})}, true, -1, ReduceOp::sum, g); },
      [](const Group& g) { all_reduce_params({bad()}, true, -1, ReduceOp::sum, g); });
  add(
      "SyncBatchNorm1d(2)",
      [](const Group& g) {
        (void)SyncBatchNorm1d(SyncBatchNormOptions(2).group(g))(torch::rand({3, 2}));
      },
      [](const Group& g) {
        (void)SyncBatchNorm1d(SyncBatchNormOptions(2).group(g))(torch::rand({3, 1}));
      });
  add(
      "batch_norm",
      [](const Group& g) {
        const SyncBatchNormScope scope(g);
        (void)torch::batch_norm(torch::rand({3, 2}), {}, {}, {}, {}, true, 0.1, 1e-5, false);
      },
      [](const Group& g) {
        const SyncBatchNormScope scope(g);
        (void)torch::batch_norm(torch::rand({3, 2}), torch::ones({3}), {}, {}, {}, true, 0.1, 1e-5,
                                false);
      });
  add(
      "DistributedDataParallel",
      [](const Group& g) {
        const DistributedDataParallel model(torch::nn::Linear(2, 1), {.group = g});
      },
      [](const Group& g) {
        const DistributedDataParallel model(torch::nn::Linear(2, 1),
                                            {.group = g, .bucket_cap_mb = -1});
      });
  return calls;
}

TEST(RefusedCallsTest, by_all_ranks_leave_the_group_usable) {
  for (const int n : {2, 3}) {
    on_ranks(n, [](int /*rank*/) {
      const Group group = default_group().duplicate();
      for (const Refusable& call : refusable_calls()) {
        SCOPED_TRACE(call.operation);
        EXPECT_THROW(call.refused(group), UsageError);
        call.made(group);
      }
    });
  }
}

TEST(RefusedCallsTest, by_one_rank_are_a_mismatch_on_all) {
  for (const int n : {2, 3}) {
    on_ranks(n, [](int rank) {
      const Group world = default_group();
      for (const Refusable& call : refusable_calls()) {
        SCOPED_TRACE(call.operation);
        const Group group = world.duplicate();
        if (rank == 1) {
          EXPECT_THROW(call.refused(group), UsageError);
        }
        const std::string text = thrown<MismatchError>([&] { call.made(group); });
        expect_contains(text, "refused " + call.operation + " #1: ");
        expect_contains(text, "refused_calls_test.cpp:");
        world.barrier();
      }
    });
  }
}

TEST(RefusedCallsTest, of_dicts_fail_on_all_ranks_and_leave_the_group_usable) {
  on_ranks(3, [](int rank) {
    std::map<std::string, Tensor> dict{{"a", rank == 1 ? bad() : torch::ones({2})}};
    if (rank == 1) {
      EXPECT_THROW(all_reduce_dict(dict), UsageError);
    } else {
      expect_contains(thrown<PeerFailed>([&] { all_reduce_dict(dict); }), "rank 1 failed: ");
    }
    Tensor one = torch::ones({1});
    all_reduce(one);
    EXPECT_EQ(one.item<float>(), 3);
  });
}

TEST(RefusedCallsTest, a_batch_that_one_rank_skips_mixes_no_statistics) {
  on_ranks(2, [](int rank) {
    SyncBatchNorm1d layer(SyncBatchNormOptions(2));
    (void)layer(torch::rand({4, 2}));
    const Tensor before = layer->running_mean.clone();
    if (rank == 1) {
      EXPECT_THROW((void)layer(torch::rand({4, 1})), UsageError);
    }
    EXPECT_THROW((void)layer(torch::rand({4, 2})), MismatchError);
    EXPECT_TRUE(layer->running_mean.equal(before));
  });
}

struct NoRow : std::runtime_error {
  NoRow() : std::runtime_error("no such row") {}
};

/// Its forward fails in two ways: in libtorch by the width of x, and in its own code without rows.
struct PickyImpl : torch::nn::Module {
  torch::nn::Linear linear =
      register_module("linear", torch::nn::Linear(torch::nn::LinearOptions(2, 1).bias(false)));
  torch::nn::BatchNorm1d norm = register_module(
      "norm", torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(2).affine(false)));
  Tensor forward(const Tensor& x) {
    if (x.size(0) == 0) throw NoRow();
    return linear(x) + 0 * norm(x).sum();
  }
};
TORCH_MODULE(Picky);

using PickyModel = DistributedDataParallel<Picky>;

void fail_by_width(PickyModel& model) {
  EXPECT_THROW((void)model(torch::rand({3, 5})), c10::Error);
}
void fail_by_own(PickyModel& model) { EXPECT_THROW((void)model(torch::rand({0, 2})), NoRow); }

/// The gradient is 4 times the mean of the ranks' x.
void step(PickyModel& model, double x) { model(torch::full({4, 2}, x)).sum().backward(); }

/// With its batch norm, and without, whose buffers are broadcast before the forward.
std::vector<DistributedDataParallelOptions> with_and_without_buffers() {
  DistributedDataParallelOptions with;
  with.broadcast_buffers = true;
  return {{}, with};
}

TEST(RefusedCallsTest, a_forward_that_fails_on_one_rank_is_a_mismatch_on_all) {
  for (const auto& options : with_and_without_buffers()) {
    for (const auto& fail : {fail_by_width, fail_by_own}) {
      on_ranks(3, [&](int rank) {
        PickyModel model(Picky(), options);
        step(model, rank);
        if (rank == 1) fail(model);
        const std::string text = thrown<MismatchError>([&] { step(model, 10 * rank); });
        expect_contains(text, "refused DistributedDataParallel #");
        expect_contains(text, "refused_calls_test.cpp:");
        if (fail == fail_by_own) expect_contains(text, "no such row");
      });
    }
  }
}

TEST(RefusedCallsTest, a_forward_that_fails_on_all_ranks_costs_nothing) {
  for (const auto& options : with_and_without_buffers()) {
    on_ranks(3, [&](int rank) {
      PickyModel model(Picky(), options);
      for (int i = 0; i < 3; ++i) {
        rank == 1 ? fail_by_width(model) : fail_by_own(model);
        model.module()->zero_grad();
        step(model, rank + i);
        EXPECT_TRUE(model.module()->linear->weight.grad().eq(4 * (1 + i)).all().item<bool>());
      }
    });
  }
}

TEST(RefusedCallsTest, a_forward_that_no_message_would_follow_does_not_count) {
  on_ranks(2, [](int rank) {
    Picky net;
    PickyModel model(net);
    const Group world = default_group();
    for (int i = 0; i < 2; ++i) {
      if (rank == 1) {
        {
          const at::NoGradGuard no_grad;
          fail_by_width(model);
        }
        net->eval();
        fail_by_own(model);
        net->train();
        {
          const auto local = model.no_sync();
          fail_by_own(model);
        }
      }
      net->zero_grad();
      step(model, rank);
      EXPECT_TRUE(net->linear->weight.grad().eq(2).all().item<bool>());
    }
    for (Tensor& parameter : net->parameters()) parameter.requires_grad_(false);
    PickyModel frozen(net);
    if (rank == 1) fail_by_own(frozen);
    (void)frozen(torch::rand({4, 2}));
    world.barrier();
  });
}

/// In join the ranks agree on each step before its forward.
TEST(RefusedCallsTest, a_forward_that_fails_in_join) {
  for (const bool is_caught : {true, false}) {
    on_ranks(2, [&](int rank) {
      PickyModel model{Picky()};
      const auto run = [&] {
        model.join([&] {
          for (int i = 0; i < 3; ++i) {
            if (rank == 1 && i == 1) {
              if (!is_caught) (void)model(torch::rand({0, 2}));
              fail_by_own(model);
            }
            step(model, rank);
          }
        });
      };
      if (is_caught) {
        EXPECT_THROW(run(), MismatchError);
      } else if (rank == 1) {
        EXPECT_THROW(run(), NoRow);
      } else {
        expect_contains(thrown<PeerFailed>(run), "no such row");
      }
    });
  }
}

}  // namespace
}  // namespace lockstep::nn
