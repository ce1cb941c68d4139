// Tensors whose memory is not their values in order, through all that sends or hashes tensors.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "helpers.hpp"
#include "support/expect.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::on_ranks;

/// A tensor, and its values in an ordinary one.
struct Sample {
  Tensor tensor, values;
};

struct NamedLayout {
  std::string name;
  /// From an ordinary tensor of 4 dimensions; nothing, if the type has no such layout.
  std::function<std::optional<Sample>(const Tensor&)> make;
  bool takes_results = true;
};

Tensor physical_conj(const Tensor& values) {
  return values.is_complex() ? at::complex(at::real(values), -at::imag(values)) : values.clone();
}

std::vector<NamedLayout> layouts() {
  using Made = std::optional<Sample>;
  return {
      {"contiguous",
       [](const Tensor& v) -> Made {
         return {{v.clone(), v}};
       }},
      {"transposed",
       [](const Tensor& v) -> Made {
         return {{v.transpose(0, 3).contiguous().transpose(0, 3), v}};
       }},
      {"channels last",
       [](const Tensor& v) -> Made {
         return {{v.clone(at::MemoryFormat::ChannelsLast), v}};
       }},
      {"every second",
       [](const Tensor& v) -> Made {
         return {{testing::strided(v), v}};
       }},
      {"expanded",
       [](const Tensor& v) -> Made {
         const Tensor one = v.narrow(0, 1, 1).clone();
         return {{one.expand(v.sizes()), at::cat({one, one})}};
       },
       /*takes_results=*/false},
      {"conjugate",
       [](const Tensor& v) -> Made {
         if (!v.is_complex()) return std::nullopt;
         return {{v.clone().conj(), physical_conj(v)}};
       }},
      {"negative",
       [](const Tensor& v) -> Made {
         return {{at::_neg_view(v.clone()), -v}};
       }},
      {"conjugate of transposed",
       [](const Tensor& v) -> Made {
         if (!v.is_complex()) return std::nullopt;
         return {{v.transpose(0, 3).contiguous().transpose(0, 3).conj(), physical_conj(v)}};
       }},
      {"imaginary part of conjugate",
       [](const Tensor& v) -> Made {
         if (v.is_complex()) return std::nullopt;
         return {{at::imag(at::complex(v + 1, v).conj()), -v}};
       }},
      {"of no dimension",
       [](const Tensor& v) -> Made {
         const Tensor one = v.flatten()[3].clone();
         return {{one, one.clone()}};
       }},
      {"negative of no dimension",
       [](const Tensor& v) -> Made {
         const Tensor one = v.flatten()[3].clone();
         return {{at::_neg_view(one), -one}};
       }},
      {"zero tensor",
       [](const Tensor& v) -> Made {
         return {{at::_efficientzerotensor(v.sizes(), v.options()), at::zeros_like(v)}};
       },
       /*takes_results=*/false},
      {"empty",
       [](const Tensor& v) -> Made {
         return {{v.narrow(0, 0, 0).clone(), v.narrow(0, 0, 0).clone()}};
       }},
  };
}

/// Whole numbers: sums are exact. Other ones for each rank.
Tensor numbers(int rank, at::ScalarType type) {
  const Tensor real = at::arange(24, at::kDouble).reshape({2, 3, 2, 2}) * (rank == 0 ? 1 : -2) + 5;
  return type == at::kDouble ? real : at::complex(real, real + 1 + rank).to(type);
}

/// The values of a tensor in an ordinary one.
Tensor plain(const Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options()).copy_(tensor.detach());
}

void expect_values(const Tensor& got, const Tensor& expected) {
  EXPECT_EQ(got.sizes(), expected.sizes());
  EXPECT_EQ(got.scalar_type(), expected.scalar_type());
  if (got.sizes() != expected.sizes()) return;
  EXPECT_TRUE(plain(got).equal(expected)) << "got " << plain(got) << "\nexpected " << expected;
}

/// One case: what this rank's tensor is, and the values of both.
struct Case {
  int rank = 0;
  bool takes_results = true;  // this rank's tensor
  std::function<Tensor()> mine;
  std::vector<Tensor> values;  // of rank 0 and 1

  const Tensor& own() const { return values[static_cast<std::size_t>(rank)]; }
  const Tensor& others() const { return values[static_cast<std::size_t>(1 - rank)]; }
};

/// Calls f for each layout and type, which rank 0, rank 1 or both have; the other has an ordinary
/// tensor of that shape.
void for_each_case(int rank, const std::function<void(const Case&)>& f) {
  for (const NamedLayout& layout : layouts()) {
    for (const auto type : {at::kDouble, at::kComplexDouble}) {
      if (!layout.make(numbers(0, type))) continue;
      for (const int who : {0, 1, 2}) {
        SCOPED_TRACE(layout.name + " of " + c10::toString(type) + " on " +
                     (who == 2 ? "both ranks" : "rank " + std::to_string(who)));
        const auto has_it = [who](int r) { return who == 2 || who == r; };
        Case one;
        one.rank = rank;
        for (const int r : {0, 1}) one.values.push_back(layout.make(numbers(r, type))->values);
        one.takes_results = layout.takes_results || !has_it(rank);
        one.mine = [&, type] {
          return has_it(rank) ? layout.make(numbers(rank, type))->tensor : one.own().clone();
        };
        f(one);
      }
    }
  }
}

TEST(LayoutsTest, of_what_is_sent) {
  on_ranks(2, [](int rank) {
    for_each_case(rank, [&](const Case& c) {
      const Tensor& like = c.own();
      const auto check_all = [&](const std::vector<Tensor>& all) {
        ASSERT_EQ(all.size(), 2U);
        for (std::size_t r = 0; r < 2; ++r) expect_values(all[r], c.values[r]);
      };
      check_all(all_gather(c.mine()));
      check_all(all_gather_async(c.mine()).wait());
      check_all(all_gather_object(c.mine()));
      const auto gathered = gather(c.mine(), /*dst=*/1);
      if (rank == 1) check_all(gathered);
      check_all(all_to_all({c.mine(), c.mine()}));
      Tensor out = at::zeros_like(like);
      scatter(out, rank == 0 ? std::vector<Tensor>{c.mine(), c.mine()} : std::vector<Tensor>{},
              /*src=*/0);
      expect_values(out, c.values[0]);
      const Tensor sum = c.values[0] + c.values[1];
      reduce_scatter(out, {c.mine(), c.mine()});
      expect_values(out, sum);
      out.zero_();
      reduce_scatter_async(out, {c.mine(), c.mine()}).wait();
      expect_values(out, sum);
      for (const int from : {0, 1}) {
        if (rank == from) {
          send(c.mine(), 1 - from);
          continue;
        }
        recv(out, from);
        expect_values(out, c.others());
      }
    });
  });
}

TEST(LayoutsTest, of_what_receives_a_result) {
  on_ranks(2, [](int rank) {
    for_each_case(rank, [&](const Case& c) {
      const Group world = default_group();
      std::int64_t take = c.takes_results ? 1 : 0;
      lockstep::all_reduce(std::span(&take, 1), ReduceOp::min, world);
      if (take == 0) return;
      const auto reduces = [&](ReduceOp op, const Tensor& expected) {
        Tensor mine = c.mine();
        all_reduce(mine, op);
        expect_values(mine, expected);
        Tensor again = c.mine();
        all_reduce_async(again, op).wait();
        expect_values(again, expected);
        Tensor on_one = c.mine();
        reduce(on_one, /*dst=*/1, op);
        expect_values(on_one, rank == 1 ? expected : c.own());
      };
      const Tensor &a = c.values[0], &b = c.values[1];
      reduces(ReduceOp::sum, a + b);
      reduces(ReduceOp::mean, (a + b) / 2);
      if (!a.is_complex()) {
        reduces(ReduceOp::max, at::maximum(a, b));
        reduces(ReduceOp::product, a * b);
      }
      for (const int root : {0, 1}) {
        Tensor mine = c.mine();
        broadcast(mine, root);
        expect_values(mine, c.values[static_cast<std::size_t>(root)]);
        mine = c.mine();
        scatter(mine,
                rank == root ? std::vector<Tensor>{c.mine(), c.mine() + 1} : std::vector<Tensor>{},
                root);
        expect_values(mine, c.values[static_cast<std::size_t>(root)] + rank);
      }
      Tensor mine = c.mine();
      reduce_scatter(mine, {c.mine(), c.mine() + 1});
      expect_values(mine, a + b + 2 * rank);
      mine = c.mine();
      all_reduce_params({mine});
      expect_values(mine, a + b);
      std::map<std::string, Tensor> dict{{"a", c.mine()}};
      all_reduce_dict(dict);
      expect_values(dict["a"], a + b);
      for (const int from : {0, 1}) {
        mine = c.mine();
        if (rank == from) {
          send(mine, 1 - from);
          continue;
        }
        recv(mine, from);
        expect_values(mine, c.others());
      }
    });
  });
}

/// Before any message: the group stays usable if all ranks do it.
TEST(LayoutsTest, a_result_cannot_go_into_a_zero_tensor) {
  on_ranks(2, [](int /*rank*/) {
    Tensor zero = at::_efficientzerotensor({3}, at::kDouble);
    const Tensor like = at::ones({3}, at::kDouble);
    const std::vector<std::function<void()>> calls{
        [&] { all_reduce(zero); },
        [&] { all_reduce_async(zero).wait(); },
        [&] { reduce(zero); },
        [&] { broadcast(zero); },
        [&] {
          scatter(zero, {like, like});
        },
        [&] {
          reduce_scatter(zero, {like, like});
        },
        [&] { all_reduce_params({zero}); },
    };
    for (const auto& call : calls) {
      const std::string text = testing::usage_error(call);
      test::expect_contains(text, {"zero tensor", "clone()"});
    }
    Tensor one = like.clone();
    all_reduce(one);
    expect_values(one, 2 * like);
  });
}

TEST(LayoutsTest, elements_of_takes_memory_that_is_the_values) {
  for (const NamedLayout& layout : layouts()) {
    const auto sample = layout.make(numbers(0, at::kDouble));
    if (!sample) continue;
    const bool is_dense =
        layout.name == "contiguous" || layout.name == "of no dimension" || layout.name == "empty";
    const std::string text = testing::usage_error([&] { (void)elements_of(sample->tensor); });
    EXPECT_EQ(text == "no error", is_dense) << layout.name << ": " << text;
  }
}

struct Holder : torch::nn::Module {
  explicit Holder(const Tensor& tensor) { register_buffer("tensor", tensor); }
  Tensor tensor() const { return named_buffers()["tensor"]; }
};

TEST(LayoutsTest, of_buffers_in_sync) {
  on_ranks(2, [](int rank) {
    for_each_case(rank, [&](const Case& c) {
      const Holder holder(rank == 0 ? c.mine() : c.values[0]);
      assert_in_sync(holder);
    });
  });
}

TEST(LayoutsTest, of_checkpoints) {
  const test::TemporaryFolder folder;
  const std::string path = folder / "saved.pt";
  on_ranks(2, [&](int rank) {
    for_each_case(rank, [&](const Case& c) {
      Holder saved(c.mine()), loaded(at::ones_like(c.own())), other(c.mine());
      save_training(path, {saved});
      expect_values(saved.tensor(), c.own());
      load_training(path, {loaded});
      expect_values(loaded.tensor(), c.values[0]);
      load_training(path, {other});
      expect_values(other.tensor(), c.values[0]);
      std::uint8_t small = 1;
      std::int64_t large = 1000;
      save_training(path, {loaded, large});
      // The number does not fit, which takes the module back.
      EXPECT_THROW(load_training(path, {saved, small}), UsageError);
      expect_values(saved.tensor(), c.own());
    });
  });
}

TEST(LayoutsTest, of_an_optimizers_state) {
  const test::TemporaryFolder folder;
  on_ranks(2, [&](int rank) {
    const Tensor values = numbers(0, at::kComplexDouble);
    struct Training {
      torch::nn::Module net;
      Tensor weight = net.register_parameter("weight", at::zeros({2, 3, 2, 2}, at::kComplexDouble));
      torch::optim::SGD optimizer{{weight}, torch::optim::SGDOptions(1).momentum(0.5)};
    } training, loaded;
    // As autograd gives it, and as averaging does.
    training.weight.mutable_grad() = rank == 0 ? values.conj() : physical_conj(values);
    training.optimizer.step();
    assert_in_sync(training.net, training.optimizer);
    const std::string path = folder / "saved.pt";
    save_training(path, {training.net, training.optimizer});
    load_training(path, {loaded.net, loaded.optimizer});
    loaded.weight.mutable_grad() = at::zeros_like(values);
    loaded.optimizer.step();
    expect_values(loaded.weight, -1.5 * physical_conj(values));
  });
}

/// Output, gradients and running statistics of a layer, whose own tensors made() makes.
std::vector<Tensor> outcome(
    const Tensor& x, const Tensor& dy,
    const std::function<Tensor(const Tensor&)>& made = [](const Tensor& v) { return v.clone(); }) {
  const Tensor each = at::tensor({1.0, 2.0, 4.0}, at::kDouble);
  SyncBatchNorm2d layer(3);
  layer->to(at::kDouble);
  layer->weight = made(each);
  layer->bias = made(each);
  layer->running_mean = made(each);
  layer->running_var = made(each);
  const Tensor leaf = x.detach().requires_grad_();
  const Tensor y = layer(leaf);
  y.backward(dy);
  return {y, leaf.grad(), layer->running_mean, layer->running_var};
}

void expect_equal(const std::vector<Tensor>& got, const std::vector<Tensor>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) expect_values(got.at(i), plain(expected[i]));
}

TEST(LayoutsTest, of_a_batch_normalisation) {
  on_ranks(2, [](int rank) {
    for_each_case(rank, [&](const Case& c) {
      if (c.own().dim() < 2 || c.own().is_complex()) return;
      const Tensor dy = at::arange(c.own().numel(), at::kDouble).view_as(c.own()).square();
      expect_equal(outcome(c.mine(), dy), outcome(c.own(), dy));
    });
    for (const auto& make :
         {std::function<Tensor(const Tensor&)>(
              [](const Tensor& v) { return at::_neg_view((-v).clone()); }),
          std::function<Tensor(const Tensor&)>([](const Tensor& v) { return testing::strided(v); }),
          std::function<Tensor(const Tensor&)>(
              [](const Tensor& v) { return at::imag(at::complex(v, -v).conj()); })}) {
      const Tensor x = numbers(rank, at::kDouble), dy = x.square();
      // On one rank only.
      const auto made = [&](const Tensor& v) { return rank == 0 ? make(v) : v.clone(); };
      expect_equal(outcome(made(x), made(dy), made), outcome(x, dy));
    }
  });
}

/// Of 3 dimensions, for which libtorch has no channels-last format.
TEST(LayoutsTest, of_a_negative_batch_with_its_channels_last) {
  const Tensor x = at::arange(24, at::kDouble).square().reshape({2, 3, 4});
  SyncBatchNorm1d layer(3);
  layer->to(at::kDouble);
  const Tensor expected = layer(testing::channels_last(x)).detach();
  expect_values(layer(at::_neg_view(testing::channels_last(-x))), expected);
}

TEST(LayoutsTest, of_a_gradient_of_a_batch_normalisation) {
  on_ranks(2, [](int rank) {
    for_each_case(rank, [&](const Case& c) {
      if (c.own().dim() < 2 || c.own().is_complex()) return;
      const Tensor x = at::arange(c.own().numel(), at::kDouble).view_as(c.own()).square();
      expect_equal(outcome(x, c.mine()), outcome(x, c.own()));
    });
  });
}

/// Its gradient is a given tensor.
struct Give : torch::autograd::Function<Give> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& parameter,
                        const std::function<Tensor()>* gradient) {
    context->saved_data["gradient"] = (*gradient)();
    return at::zeros({}, parameter.options());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list&) {
    return {context->saved_data["gradient"].toTensor(), Tensor()};
  }
};

struct GivenImpl : torch::nn::Module {
  Tensor parameter;
  explicit GivenImpl(const Tensor& like)
      : parameter(register_parameter("parameter", at::zeros_like(like))) {}
  Tensor forward(const std::function<Tensor()>& gradient) {
    return Give::apply(parameter, &gradient).abs();
  }
};
TORCH_MODULE(Given);

TEST(LayoutsTest, of_gradients) {
  on_ranks(2, [](int rank) {
    for_each_case(rank, [&](const Case& c) {
      Given net(c.own());
      DistributedDataParallel model(net);
      const Tensor mean = (c.values[0] + c.values[1]) / 2;
      model(c.mine).backward();
      expect_values(net->parameter.grad(), mean);
      model(c.mine).backward();  // added to what is there
      expect_values(net->parameter.grad(), 2 * mean);
      // One that this rank has set, of which the other ranks have another.
      const Tensor conj = physical_conj(net->parameter.grad());
      net->parameter.mutable_grad() = net->parameter.grad().conj();
      model(c.mine).backward();
      expect_values(net->parameter.grad(), conj + mean);
      net->parameter.mutable_grad() = at::_neg_view(net->parameter.grad());
      model(c.mine).backward();
      expect_values(net->parameter.grad(), -conj);
    });
  });
}

}  // namespace
}  // namespace lockstep::nn
