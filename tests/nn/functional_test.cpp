#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <functional>
#include <string>
#include <vector>

#include "helpers.hpp"
#include "support/expect.hpp"

// Collectives that autograd knows: N ranks have the values and gradients of one device that has the
// tensors of all.
namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::difference, testing::on_ranks, testing::Random, testing::share_of, testing::Shares,
    testing::usage_error;
using torch::autograd::grad;
namespace collective = lockstep::nn::functional;

using Tensors = std::vector<Tensor>;

/// What each rank computes from its inputs, over its group, and one device from those of all.
struct Case {
  const char* name;
  std::function<Tensors(const Tensors& mine)> over_ranks;
  std::function<Tensors(const std::vector<Tensors>& all, int rank, int n)> on_one_device;
  std::size_t n_inputs = 1;  ///< of a rank; 0: as many as ranks
};

Tensor sum_of(const std::vector<Tensors>& all, std::size_t i = 0) {
  Tensor sum = all[0][i];
  for (std::size_t r = 1; r < all.size(); ++r) sum = sum + all[r][i];
  return sum;
}

Tensors column_of(const std::vector<Tensors>& all, std::size_t i = 0) {
  Tensors column;
  for (const Tensors& inputs : all) column.push_back(inputs[i]);
  return column;
}

std::vector<Case> cases() {
  const auto z = [](int rank) { return static_cast<std::size_t>(rank); };
  const auto zeros_but = [](const Tensors& all, bool is_root) {
    Tensors result;
    for (const Tensor& tensor : all) result.push_back(is_root ? tensor : tensor * 0);
    return result;
  };
  return {
      {"all_reduce", [](const Tensors& mine) { return Tensors{collective::all_reduce(mine[0])}; },
       [](const auto& all, int, int) { return Tensors{sum_of(all)}; }},
      {"all_reduce of a mean",
       [](const Tensors& mine) { return Tensors{collective::all_reduce(mine[0], ReduceOp::mean)}; },
       [](const auto& all, int, int n) { return Tensors{sum_of(all) / n}; }},
      {"all_gather", [](const Tensors& mine) { return collective::all_gather(mine[0]); },
       [](const auto& all, int, int) { return column_of(all); }},
      {"reduce_scatter",
       [](const Tensors& mine) { return Tensors{collective::reduce_scatter(mine)}; },
       [z](const auto& all, int rank, int) { return Tensors{sum_of(all, z(rank))}; }, 0},
      {"reduce_scatter of a mean",
       [](const Tensors& mine) {
         return Tensors{collective::reduce_scatter(mine, ReduceOp::mean)};
       },
       [z](const auto& all, int rank, int n) { return Tensors{sum_of(all, z(rank)) / n}; }, 0},
      {"all_to_all", [](const Tensors& mine) { return collective::all_to_all(mine); },
       [z](const auto& all, int rank, int) { return column_of(all, z(rank)); }, 0},
      {"broadcast",
       [](const Tensors& mine) {
         return Tensors{collective::broadcast(mine[0], get_world_size() - 1)};
       },
       [z](const auto& all, int, int n) { return Tensors{all[z(n - 1)][0]}; }},
      {"reduce",
       [](const Tensors& mine) {
         return Tensors{collective::reduce(mine[0], get_world_size() - 1, ReduceOp::mean)};
       },
       [zeros_but](const auto& all, int rank, int n) {
         return zeros_but({sum_of(all) / n}, rank == n - 1);
       }},
      {"gather",
       [](const Tensors& mine) { return collective::gather(mine[0], get_world_size() - 1); },
       [zeros_but](const auto& all, int rank, int n) {
         return zeros_but(column_of(all), rank == n - 1);
       }},
      {"scatter",
       [](const Tensors& mine) { return Tensors{collective::scatter(mine, get_world_size() - 1)}; },
       [z](const auto& all, int rank, int n) { return Tensors{all[z(n - 1)][z(rank)]}; }, 0},
  };
}

/// A rank's loss: curved, and another on each rank.
Tensor loss_of(const Tensors& results, int rank) {
  Tensor loss = at::zeros({}, results[0].options());
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Tensor factors = Random(100 * static_cast<std::uint64_t>(rank) + i)
                               .normal(results[i].sizes(), results[i].scalar_type());
    loss = loss + (results[i] * results[i] * factors + results[i].sin()).sum();
  }
  return loss;
}

std::vector<Tensors> inputs_of(const Case& of, int n) {
  std::vector<Tensors> all(static_cast<std::size_t>(n));
  std::uint64_t seed = 0;
  for (Tensors& inputs : all) {
    const auto n_inputs = of.n_inputs == 0 ? static_cast<std::size_t>(n) : of.n_inputs;
    for (std::size_t i = 0; i < n_inputs; ++i) {
      inputs.push_back(Random(++seed).normal({2, 3}).requires_grad_());
    }
  }
  return all;
}

/// Values, gradients, and gradients of the sum of the gradients' squares.
TEST(FunctionalTest, values_gradients_and_second_gradients_are_those_of_one_device) {
  for (const int n : {1, 2, 3, 4}) {
    for (const Case& of : cases()) {
      const auto whole = inputs_of(of, n);
      Tensor loss, penalty;
      std::vector<Tensors> values;
      const auto plus = [](Tensor& sum, const Tensor& value) {
        sum = sum.defined() ? sum + value : value;
      };
      for (int r = 0; r < n; ++r) {
        values.push_back(of.on_one_device(whole, r, n));
        plus(loss, loss_of(values.back(), r));
      }
      Tensors leaves;
      for (const Tensors& inputs : whole) leaves.insert(leaves.end(), inputs.begin(), inputs.end());
      const Tensors first =
          grad({loss}, leaves, {}, true, /*create_graph=*/true, /*allow_unused=*/true);
      for (const Tensor& gradient : first) {
        if (gradient.defined()) plus(penalty, gradient.pow(2).sum());
      }
      const Tensors second = grad({penalty}, leaves, {}, true, false, /*allow_unused=*/true);
      on_ranks(n, [&](int rank) {
        const Tensors mine = inputs_of(of, n)[static_cast<std::size_t>(rank)];
        const Tensors results = of.over_ranks(mine);
        for (std::size_t i = 0; i < results.size(); ++i) {
          EXPECT_LE(difference(results[i], values[static_cast<std::size_t>(rank)][i]), 1e-12)
              << of.name;
        }
        const Tensors of_mine =
            grad({loss_of(results, rank)}, mine, {}, true, /*create_graph=*/true);
        Tensor own_penalty = at::zeros({}, at::kDouble);
        const std::size_t from = mine.size() * static_cast<std::size_t>(rank);
        const auto expect_equal = [&](const Tensor& own, const Tensor& expected) {
          EXPECT_LE(expected.defined() ? difference(own, expected) : testing::largest(own), 1e-10)
              << of.name << " over " << n;
        };
        for (std::size_t i = 0; i < mine.size(); ++i) {
          expect_equal(of_mine[i], first[from + i]);
          own_penalty = own_penalty + of_mine[i].pow(2).sum();
        }
        own_penalty.backward();
        for (std::size_t i = 0; i < mine.size(); ++i) {
          expect_equal(mine[i].grad(), second[from + i]);
        }
      });
    }
  }
}

TEST(FunctionalTest, parts_of_different_sizes) {
  const Tensor batch = Random(1).normal({9, 3}) / 2;  // else a gradient's last place is above 1e-9
  for (const Shares& shares : {Shares{4, 5}, Shares{2, 0, 7}}) {
    const Tensor leaf = batch.detach().requires_grad_();
    (leaf.matmul(leaf.t()).exp() * at::arange(81).view({9, 9}).to(at::kDouble)).sum().backward();
    on_ranks(static_cast<int>(shares.size()), [&](int rank) {
      const Tensor mine = share_of(batch, shares, rank).detach().clone().requires_grad_();
      const Tensors parts = collective::all_gather(mine);
      for (std::size_t r = 0; r < parts.size(); ++r) {
        EXPECT_LE(difference(parts[r], share_of(batch, shares, static_cast<int>(r))), 0);
      }
      const Tensor all = at::cat(parts);
      // Each rank's part of the loss: the rows of its samples.
      const Tensor factors = share_of(at::arange(81).view({9, 9}).to(at::kDouble), shares, rank);
      (mine.matmul(all.t()).exp() * factors).sum().backward();
      EXPECT_LE(difference(mine.grad(), share_of(leaf.grad(), shares, rank)), 1e-9);
    });
  }
}

/// NT-Xent over the embeddings of two views of each sample.
Tensor simclr_loss(const Tensor& first, const Tensor& second) {
  const Tensor all = torch::nn::functional::normalize(
      at::cat({first, second}), torch::nn::functional::NormalizeFuncOptions().dim(1));
  const std::int64_t n = first.size(0);
  const Tensor scores = all.matmul(all.t()) / 0.5 - at::eye(2 * n, all.options()) * 1e9;
  const Tensor partners = at::arange(2 * n).add(n).remainder(2 * n);
  return torch::nn::functional::cross_entropy(scores, partners);
}

/// The loss is the same on all ranks: averaged gradients are those of one rank.
TEST(FunctionalTest, a_contrastive_loss_over_gathered_embeddings_is_that_of_one_rank) {
  const Tensor views = Random(2).normal({12, 2, 5});
  const auto net = [] {
    torch::nn::Sequential layers(torch::nn::Linear(5, 8), torch::nn::Tanh(),
                                 torch::nn::Linear(8, 4));
    layers->to(at::kDouble);
    const at::NoGradGuard no_grad;
    Random random(3);
    for (Tensor& parameter : layers->parameters())
      parameter.set_data(random.normal(parameter.sizes()));
    return layers;
  };
  auto one = net();
  const Tensor loss =
      simclr_loss(one->forward(views.select(1, 0)), one->forward(views.select(1, 1)));
  loss.backward();
  for (const Shares& shares : {Shares{6, 6}, Shares{5, 3, 4}, Shares{3, 3, 3, 3}}) {
    on_ranks(static_cast<int>(shares.size()), [&](int rank) {
      auto layers = net();
      const Tensor mine = share_of(views, shares, rank);
      const auto gathered = [&](std::int64_t view) {
        return at::cat(collective::all_gather(layers->forward(mine.select(1, view))));
      };
      const Tensor own_loss = simclr_loss(gathered(0), gathered(1));
      EXPECT_LE(difference(own_loss, loss), 1e-12);
      own_loss.backward();
      for (std::size_t i = 0; i < layers->parameters().size(); ++i) {
        Tensor gradient = layers->parameters()[i].grad();
        all_reduce(gradient, ReduceOp::mean);
        EXPECT_LE(difference(gradient, one->parameters()[i].grad()), 1e-10);
      }
    });
  }
}

/// Linear(4, 6), tanh, Linear(6, 3), of which each rank has some columns and then the same rows.
TEST(FunctionalTest, column_and_row_parallel_layers_are_a_pair_of_linear_layers) {
  const Tensor x = Random(4).normal({5, 4}), a = Random(5).normal({6, 4}),
               b = Random(6).normal({3, 6});
  const auto leaf = [](const Tensor& tensor) { return tensor.detach().clone().requires_grad_(); };
  const auto second_order = [](const Tensor& y, const Tensors& leaves) {
    Tensors all{y};
    const Tensors first = grad({y.pow(3).sum()}, leaves, {}, true, /*create_graph=*/true);
    all.insert(all.end(), first.begin(), first.end());
    first[0].pow(2).sum().backward();  // of x, which all ranks have: a loss that counts once
    for (const Tensor& tensor : leaves) all.push_back(tensor.grad());
    return all;
  };
  const Tensor x0 = leaf(x), a0 = leaf(a), b0 = leaf(b);
  const Tensors one = second_order(x0.matmul(a0.t()).tanh().matmul(b0.t()), {x0, a0, b0});
  for (const int n : {1, 2, 3}) {
    on_ranks(n, [&](int rank) {
      const std::int64_t width = 6 / n, from = width * rank;
      const Tensor x1 = leaf(x), a1 = leaf(a.narrow(0, from, width)),
                   b1 = leaf(b.narrow(1, from, width));
      const Tensor hidden = collective::replicate(x1).matmul(a1.t()).tanh();
      const Tensors mine =
          second_order(collective::reduce_replicated(hidden.matmul(b1.t())), {x1, a1, b1});
      ASSERT_EQ(mine.size(), one.size());
      for (const std::size_t i : {0U, 1U, 4U}) EXPECT_LE(difference(mine[i], one[i]), 1e-9) << i;
      for (const std::size_t i : {2U, 5U}) {
        EXPECT_LE(difference(mine[i], one[i].narrow(0, from, width)), 1e-9) << i;
        EXPECT_LE(difference(mine[i + 1], one[i + 1].narrow(1, from, width)), 1e-9) << i;
      }
    });
  }
}

TEST(FunctionalTest, without_a_gradient_nothing_is_recorded) {
  on_ranks(2, [](int rank) {
    const Tensor data = at::full({2}, rank, at::kLong);
    EXPECT_TRUE(collective::all_reduce(data).eq(1).all().item<bool>());
    const Tensor needs = at::ones({2}).requires_grad_();
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(collective::all_gather(needs)[0].requires_grad());
  });
}

TEST(FunctionalTest, a_gradient_is_needed_where_that_of_the_source_is) {
  on_ranks(2, [](int rank) {
    const Tensor other = at::ones({2}).requires_grad_(rank == 1);
    EXPECT_FALSE(collective::broadcast(other, /*src=*/0).requires_grad());
    EXPECT_FALSE(collective::scatter({other, other}, /*src=*/0).requires_grad());
    const Tensor result = collective::broadcast(other, /*src=*/1);
    EXPECT_TRUE(result.requires_grad());
    result.sum().backward();
    if (rank == 1) {
      EXPECT_TRUE(other.grad().eq(2).all().item<bool>());
    }
  });
}

TEST(FunctionalTest, results_are_tensors_of_their_own) {
  on_ranks(2, [](int /*rank*/) {
    for (const bool needs_gradient : {false, true}) {
      const Tensor data = -at::ones({2}).requires_grad_(needs_gradient);
      for (Tensor result : {collective::replicate(data), collective::all_reduce(data),
                            collective::broadcast(data), collective::all_gather(data)[0]}) {
        result.relu_();
        EXPECT_TRUE(data.eq(-1).all().item<bool>());
      }
    }
  });
}

std::string mismatch_of(int n, int rank_of_text, const std::function<void(int)>& body) {
  std::string text = "no error";
  on_ranks(n, [&](int rank) {
    try {
      body(rank);
    } catch (const MismatchError& error) {
      if (rank == rank_of_text) text = error.what();
    }
  });
  return text;
}

TEST(FunctionalTest, a_rank_without_a_gradient_is_named) {
  const std::string text = mismatch_of(3, 0, [](int rank) {
    const Tensor data = at::ones({2}).requires_grad_(rank != 1);
    (void)collective::all_reduce(data);
  });
  test::expect_contains(text, {"forward of functional::all_reduce",
                               "rank 1: all_reduce of Float [2], needs no gradient",
                               "ranks 0, 2: all_reduce of Float [2], needs a gradient"});
}

TEST(FunctionalTest, other_calls_shapes_and_types_are_named) {
  std::string text = mismatch_of(2, 1, [](int rank) {
    const Tensor data = at::ones({2}).requires_grad_();
    (void)(rank == 0 ? collective::all_reduce(data) : collective::all_gather(data)[0]);
  });
  test::expect_contains(text,
                        {"rank 0: all_reduce of Float [2]", "rank 1: all_gather of Float [2]"});
  text = mismatch_of(2, 0, [](int rank) {
    (void)collective::all_gather(rank == 0 ? at::ones({2, 3}) : at::ones({2, 4}));
  });
  test::expect_contains(text, "rank 1: all_gather of Float [2, 4]");
  text = mismatch_of(2, 0, [](int rank) {
    (void)collective::broadcast(rank == 0 ? at::ones({2}) : at::ones({2}, at::kDouble));
  });
  test::expect_contains(text, "rank 1: broadcast of Double [2], root 0");
}

TEST(FunctionalTest, create_graph_on_some_ranks_and_parts_of_other_shapes_are_named) {
  std::string text = mismatch_of(2, 0, [](int rank) {
    const Tensor x = at::ones({2}).requires_grad_();
    const Tensor loss = collective::all_reduce(x.pow(2)).pow(2).sum();
    (void)grad({loss}, {x}, {}, true, /*create_graph=*/rank == 1);
  });
  test::expect_contains(text, ", with create_graph, line");
  text = mismatch_of(2, 1, [](int rank) {
    const Tensor part = at::ones({2 + rank}).requires_grad_();
    (void)collective::scatter({part, part});
  });
  test::expect_contains(text, "rank 1: scatter of Float [3], root 0");
}

/// The graphs of two calls are walked in another order on rank 1.
TEST(FunctionalTest, backward_of_another_call_is_named) {
  const std::string text = mismatch_of(2, 0, [](int rank) {
    const Tensor a = at::ones({2}).requires_grad_(), b = at::ones({2}).requires_grad_();
    const Tensor first = collective::all_reduce(a), second = collective::all_reduce(b);
    (rank == 0 ? first : second).sum().backward();
    (rank == 0 ? second : first).sum().backward();
  });
  test::expect_contains(text, {"backward of functional::all_reduce",
                               "backward by all_reduce of Float [2], of forward #"});
}

TEST(FunctionalTest, a_rank_that_leaves_its_result_out_of_the_loss_is_named) {
  std::string text;
  run_ranks(2,
            [&](int rank) {
              const Tensor x = at::ones({2}).requires_grad_();
              const Tensor result = collective::reduce(x);
              const Tensor loss = rank == 0 ? result.sum() : x.sum();  // without `+ result.sum()`
              try {
                loss.backward();
                barrier();
              } catch (const Error& error) {
                if (rank == 0) text = error.what();
              }
            },
            {.timeout = std::chrono::milliseconds(500)});
  test::expect_contains(text, {"backward of functional::reduce", "1  "});
}

TEST(FunctionalTest, wrong_arguments_are_refused_and_the_group_stays_usable) {
  on_ranks(2, [](int /*rank*/) {
    const Tensor data = at::ones({2}).requires_grad_();
    const auto expect = [&](const std::function<void()>& call, const char* part) {
      const std::string text = usage_error(call);
      test::expect_contains(text, part);
      EXPECT_EQ(all_reduce_value(1), 2);
    };
    expect([&] { (void)collective::all_reduce(data, ReduceOp::max); },
           "those with a gradient are sum and mean");
    expect([&] { (void)collective::all_reduce(Tensor()); }, "got an undefined tensor");
    expect([&] { (void)collective::all_reduce(at::eye(2).to_sparse()); },
           "expected a dense CPU or CUDA tensor");
    expect([&] { (void)collective::all_to_all({data}); },
           "got 1 parts, expected one for each of 2 ranks");
    expect(
        [&] {
          (void)collective::all_to_all({data, at::ones({3})});
        },
        "parts must be of one shape and type");
    expect(
        [&] {
          (void)collective::reduce_scatter({at::ones({2, 3}), at::ones({4, 4})});
        },
        "one shape, but for the first size,");
    expect([&] { (void)collective::reduce_scatter({at::ones({}), at::ones({2})}); }, "one shape");
    expect([&] { (void)collective::broadcast(data, 2); }, "src is 2; the group's ranks are 0 to 1");
    expect([&] { (void)collective::all_gather(at::ones(std::vector<std::int64_t>(11, 1))); },
           "at most 10");
    expect([&] { (void)collective::all_reduce(at::ones({2}, at::kBool)); }, "sum of bool");
  });
}

}  // namespace
}  // namespace lockstep::nn
