// A call of the libtorch layer that one rank refuses, and that all refuse.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <functional>
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

}  // namespace
}  // namespace lockstep::nn
