// Parameters that change after they were given to DistributedDataParallel.
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <lockstep/engine.hpp>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "helpers.hpp"
#include "support/expect.hpp"

namespace lockstep::nn {
namespace ddp_parameters_test {

using at::Tensor;
using testing::difference, testing::on_ranks, testing::Random, testing::share_of, testing::Shares;
using torch::nn::Linear;
using torch::nn::LinearOptions;
using torch::nn::Sequential;

Sequential two_layers() {
  Sequential net(Linear(LinearOptions(1, 1).bias(false)), Linear(1, 1));
  const at::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.fill_(1);
  return net;
}

std::string saved(const Sequential& net) {
  std::ostringstream stream;
  torch::save(net, stream);
  return stream.str();
}

void load_archive(torch::nn::Module& net, const std::string& bytes) {
  std::istringstream stream(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  net.load(archive);
}

struct Change {
  std::string name;
  std::function<void(Sequential&)> apply;
};

const std::vector<Change>& changes() {
  static const std::vector<Change> all{
      {"none", [](Sequential&) {}},
      {"torch::load",
       [](Sequential& net) {
         std::istringstream stream(saved(net));
         torch::load(net, stream);
       }},
      {"load of an archive", [](Sequential& net) { load_archive(*net, saved(net)); }},
      {"torch::load of one layer",
       [](Sequential& net) {
         Linear layer(net->ptr<torch::nn::LinearImpl>(1));
         std::stringstream stream;
         torch::save(layer, stream);
         torch::load(layer, stream);
       }},
      {"to(kDouble)", [](Sequential& net) { net->to(at::kDouble); }},
      {"set_data",
       [](Sequential& net) {
         Tensor weight = net->parameters()[0];
         weight.set_data(weight.detach().clone());
       }},
      {"requires_grad_",
       [](Sequential& net) {
         for (auto& parameter : net->parameters()) parameter.requires_grad_(false);
         for (auto& parameter : net->parameters()) parameter.requires_grad_(true);
       }},
      {"thawed", [](Sequential& net) { net->ptr(1)->parameters()[1].requires_grad_(true); }}};
  return all;
}

/// A forward and backward of this rank alone would give the first weight a gradient of rank + 1.
void backward(const Sequential& net, int rank,
              const std::function<Tensor(const Tensor&)>& forward) {
  for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
  const Tensor x = at::full({1, 1}, rank + 1.0, net->parameters()[0].options());
  forward(x.detach()).sum().backward();
}

void expect_averaged(const Sequential& net, const std::string& when) {
  const auto parameters = net->named_parameters();
  EXPECT_EQ(parameters["0.weight"].grad().item<double>(), 1.5) << when;
  EXPECT_EQ(parameters["1.weight"].grad().item<double>(), 1.5) << when;
  EXPECT_EQ(parameters["1.bias"].grad().item<double>(), 1) << when;
}

TEST(DdpParametersTest, are_averaged_after_a_change) {
  for (const Change& change : changes()) {
    on_ranks(2, [&](int rank) {
      Sequential net = two_layers();
      if (change.name == "thawed") net->ptr(1)->parameters()[1].requires_grad_(false);
      DistributedDataParallel model(net);
      const auto forward = [&](const Tensor& x) { return model(x); };
      for (const bool is_first : {true, false}) {
        if (!is_first) backward(net, rank, forward);
        change.apply(net);
        for (int step = 0; step < 2; ++step) backward(net, rank, forward);
        expect_averaged(net, change.name);
      }
    });
  }
}

/// Not through DistributedDataParallel::forward: averaged, or an error.
TEST(DdpParametersTest, are_averaged_or_rejected_in_a_forward_of_the_module) {
  for (const Change& change : changes()) {
    on_ranks(2, [&](int rank) {
      Sequential net = two_layers();
      if (change.name == "thawed") net->ptr(1)->parameters()[1].requires_grad_(false);
      DistributedDataParallel model(net);
      change.apply(net);
      try {
        backward(net, rank, [&](const Tensor& x) { return net->forward(x); });
        expect_averaged(net, change.name);
      } catch (const UsageError& error) {
        EXPECT_NE(change.name, "none") << error.what();
        test::expect_contains(error.text(), {"parameter ", "forward"});
        test::expect_contains(error.what(), "ddp_parameters_test.cpp");
      }
      backward(net, rank, [&](const Tensor& x) { return model(x); });
      expect_averaged(net, change.name + ", then through the wrapper");
    });
  }
}

TEST(DdpParametersTest, a_forward_of_the_module_after_no_sync_is_averaged) {
  on_ranks(2, [](int rank) {
    Sequential net = two_layers();
    DistributedDataParallel model(net);
    Tensor late;
    {
      const auto guard = model.no_sync();
      backward(net, rank, [&](const Tensor& x) { return model(x); });
      EXPECT_EQ(net->parameters()[0].grad().item<float>(), rank + 1);
      late = model(at::full({1, 1}, rank + 1.0));
    }
    late.sum().backward();
    EXPECT_EQ(net->parameters()[0].grad().item<float>(), 2 * (rank + 1)) << "its forward counts";
    backward(net, rank, [&](const Tensor& x) { return net->forward(x); });
    expect_averaged(net, "after no_sync");
  });
}

TEST(DdpParametersTest, a_backward_that_threw_within_no_sync_is_forgotten) {
  on_ranks(2, [](int rank) {
    Sequential net = two_layers();
    DistributedDataParallel model(net);
    bool throws = true;
    net->parameters()[0].register_hook([&](const Tensor& /*gradient*/) {
      if (throws) throw std::runtime_error("not this time");
    });
    {
      const auto guard = model.no_sync();
      EXPECT_THROW(backward(net, rank, [&](const Tensor& x) { return model(x); }),
                   std::runtime_error);
    }
    throws = false;
    backward(net, rank, [&](const Tensor& x) { return net->forward(x); });
    expect_averaged(net, "after the backward that threw");
  });
}

TEST(DdpParametersTest, loaded_on_one_rank_only) {
  EXPECT_THROW(on_ranks(2,
                        [](int rank) {
                          Sequential net = two_layers();
                          DistributedDataParallel model(net);
                          if (rank == 0) load_archive(*net, saved(net));
                          backward(net, rank, [&](const Tensor& x) { return model(x); });
                        }),
               MismatchError);
}

/// The other rank goes on to the statistics of a layer, in another group than the gradients'.
TEST(DdpParametersTest, changed_on_one_rank_only_under_synchronised_batch_norm) {
  for (const bool is_in_scope : {false, true}) {
    for (const Change& change : changes()) {
      // There and back again leaves libtorch's accumulator, and so nothing to take anew.
      if (change.name == "none" || change.name == "requires_grad_") continue;
      for (const int changed : {0, 1}) {
        std::array<std::string, 2> texts;
        const auto body = [&](int rank) {
          Sequential net = two_layers();
          net->push_back(torch::nn::BatchNorm1d(1));
          if (!is_in_scope) convert_sync_batchnorm(net);
          if (change.name == "thawed") net->ptr(1)->parameters()[1].requires_grad_(false);
          DistributedDataParallel model(net);
          try {
            for (int step = 0; step < 2; ++step) {
              if (step == 1 && rank == changed) change.apply(net);
              std::optional<SyncBatchNormScope> scope;
              if (is_in_scope) scope.emplace();
              backward(net, rank, [&](const Tensor& x) { return model(x.repeat({2, 1})); });
            }
          } catch (const MismatchError& error) {
            texts[static_cast<std::size_t>(rank)] = error.what();
            throw;
          }
        };
        EXPECT_THROW(on_ranks(2, body), MismatchError) << change.name;
        const std::string& text = texts[static_cast<std::size_t>(changed)];
        EXPECT_NE(text.find("which was changed on this rank"), std::string::npos)
            << change.name << text;
        test::expect_contains(text, "updating parameter ");
        EXPECT_NE(texts[static_cast<std::size_t>(1 - changed)], "") << change.name;
        if (HasFailure()) return;  // each is as long as the limit of a call
      }
    }
  }
}

TEST(DdpParametersTest, changed_on_all_ranks_under_synchronised_batch_norm) {
  on_ranks(2, [](int rank) {
    Sequential net = two_layers();
    net->push_back(torch::nn::BatchNorm1d(1));
    convert_sync_batchnorm(net);
    DistributedDataParallel model(net);
    for (int step = 0; step < 3; ++step) {
      load_archive(*net, saved(net));
      backward(net, rank, [&](const Tensor& x) { return model(x); });
    }
    assert_in_sync(net);
  });
}

TEST(DdpParametersTest, rank_0s_values_hold_after_a_load) {
  on_ranks(2, [](int rank) {
    Sequential net = two_layers(), other = two_layers();
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : other->parameters()) parameter.fill_(rank + 5);
    }
    DistributedDataParallel model(net);
    load_archive(*net, saved(other));
    backward(net, rank, [&](const Tensor& x) { return model(x); });
    for (const auto& parameter : net->parameters()) EXPECT_EQ(parameter.item<float>(), 5);
  });
}

TEST(DdpParametersTest, in_two_wrappers_are_rejected) {
  on_ranks(2, [](int rank) {
    Sequential net = two_layers();
    using Model = DistributedDataParallel<Sequential>;
    std::optional<Model> first(net);
    DistributedDataParallel second(Linear(net->ptr<torch::nn::LinearImpl>(1)));
    const std::vector<std::function<Tensor(const Tensor&)>> forwards{
        [&](const Tensor& x) { return (*first)(x); }, [&](const Tensor& x) { return second(x); }};
    for (const auto& forward : forwards) {
      test::expect_contains(test::thrown<UsageError>([&] { backward(net, rank, forward); }),
                            "another DistributedDataParallel");
    }
    first.reset();
    first.emplace(Model(net));  // as `model = DistributedDataParallel(net)` does
    first = Model(net);
  });
  on_ranks(2, [](int rank) {
    Sequential net = two_layers();
    DistributedDataParallel model(net);
    model = DistributedDataParallel(net);  // the first lives until the second is there
    backward(net, rank, [&](const Tensor& x) { return model(x); });
    expect_averaged(net, "wrapped again");
  });
}

/// As docs/ddp.md has it.
/// A TorchScript network with a batch normalisation: two layers in a submodule, as of a file.
torch::jit::Module scripted() {
  torch::jit::Module inner("Inner"), outer("Outer");
  Random random(1);
  inner.register_parameter("weight", random.normal({4, 3}).requires_grad_(), false);
  inner.register_parameter("scale", random.normal({4}).requires_grad_(), false);
  inner.register_parameter("shift", random.normal({4}).requires_grad_(), false);
  inner.register_buffer("mean", at::zeros({4}, at::kDouble));
  inner.register_buffer("var", at::ones({4}, at::kDouble));
  inner.register_attribute("training", c10::BoolType::get(), true);
  inner.define(R"(
    def forward(self, x):
      y = torch.matmul(x, self.weight.t())
      return torch.batch_norm(y, self.scale, self.shift, self.mean, self.var, self.training, 0.1, 1e-5, False)
  )");
  outer.register_module("inner", inner);
  outer.register_parameter("last", random.normal({1, 4}).requires_grad_(), false);
  outer.register_attribute("training", c10::BoolType::get(), true);
  outer.define(
      "def forward(self, x):\n  return torch.matmul(torch.tanh(self.inner.forward(x)), "
      "self.last.t())\n");
  std::stringstream file;
  outer.save(file);
  return torch::jit::load(file);
}

std::vector<Tensor> parameters_of(const torch::jit::Module& script) {
  std::vector<Tensor> parameters;
  for (const Tensor& parameter : script.parameters()) parameters.push_back(parameter);
  return parameters;
}

/// Three steps of SGD on rank `rank`'s rows, which give its share of the loss of the batch.
std::vector<Tensor> train_scripted(const Shares& shares, int rank, bool with_join = false) {
  const Tensor batch = Random(2).normal({12, 3}), target = Random(3).normal({12, 1});
  torch::jit::Module script = scripted();
  DistributedDataParallel model(script);
  torch::optim::SGD optimizer(parameters_of(script), torch::optim::SGDOptions(0.1).momentum(0.9));
  const Tensor x = share_of(batch, shares, rank), y = share_of(target, shares, rank);
  const SyncBatchNormScope scope;
  const auto steps = [&] {
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const Tensor loss = (model(x).toTensor() - y).pow(2).sum() / 12.0 * get_world_size();
      loss.backward();
      optimizer.step();
    }
  };
  if (with_join) {
    model.join(steps, {.optimizers = {&optimizer}});
  } else {
    steps();
  }
  auto all = parameters_of(script);
  for (const Tensor& buffer : script.buffers()) all.push_back(buffer);
  return all;
}

TEST(DdpParametersTest, of_a_torch_script_module) {
  static_assert(!ModuleHandle<torch::jit::Module>);
  const auto alone = train_scripted({12}, 0);
  for (const Shares& shares : {Shares{6, 6}, Shares{3, 5, 4}, Shares{1, 4, 5, 2}}) {
    for (const bool with_join : {false, true}) {
      on_ranks(static_cast<int>(shares.size()), [&](int rank) {
        const auto mine = train_scripted(shares, rank, with_join);
        for (std::size_t i = 0; i < alone.size(); ++i) {
          EXPECT_LE(difference(mine[i], alone[i]), 1e-9) << i;
        }
      });
    }
  }
}

TEST(DdpParametersTest, of_a_torch_script_module_that_differs) {
  on_ranks(2, [](int rank) {
    torch::jit::Module script = scripted();
    if (rank == 1) {
      auto inner = script.attr("inner").toModule();
      const at::NoGradGuard no_grad;
      inner.attr("scale").toTensor().set_data(at::ones({5}, at::kDouble));
    }
    test::expect_contains(
        test::thrown<MismatchError>([&] { DistributedDataParallel model(script); }),
        "rank 0 has parameter inner.scale Double [4], rank 1 has "
        "parameter inner.scale Double [5]");
  });
}

/// Its mode is that of the wrapper, and the other way round.
TEST(DdpParametersTest, the_mode_of_a_torch_script_module) {
  on_ranks(2, [](int /*rank*/) {
    torch::jit::Module script = scripted();
    DistributedDataParallel model(script);
    model.module()->eval();
    EXPECT_FALSE(script.is_training());
    EXPECT_FALSE(script.attr("inner").toModule().is_training());
    script.train();
    EXPECT_TRUE(model.module()->is_training());
  });
}

/// A frozen batch normalisation of a script stays frozen on a rank that shadows the others.
TEST(DdpParametersTest, the_modes_of_a_script_in_join) {
  on_ranks(2, [](int rank) {
    torch::jit::Module script = scripted();
    auto inner = script.attr("inner").toModule();
    inner.eval();
    DistributedDataParallel model(script);
    const SyncBatchNormScope scope;
    model.join(
        [&] {
          for (int step = 0; step < 2 + 2 * rank; ++step) {
            model(Random(2).normal({4, 3})).toTensor().sum().backward();
          }
        },
        {});
    EXPECT_TRUE(script.is_training());
    EXPECT_FALSE(inner.is_training());
    EXPECT_EQ(testing::largest(inner.attr("mean").toTensor()), 0);
  });
}

/// Without a module: a vector, or tensors with names.
template <class Make>
std::vector<Tensor> train_parameters(const Shares& shares, int rank, const Make& make) {
  const Tensor batch = Random(2).normal({12, 3}), target = Random(3).normal({12, 1});
  // Rank 0's values.
  std::vector<Tensor> parameters{Random(4 + static_cast<std::uint64_t>(rank)).normal({4, 3}),
                                 Random(9 + static_cast<std::uint64_t>(rank)).normal({1, 4})};
  for (Tensor& parameter : parameters) parameter.requires_grad_();
  auto model = make(parameters);
  torch::optim::Adam optimizer(parameters, torch::optim::AdamOptions(0.1));
  const Tensor x = share_of(batch, shares, rank), y = share_of(target, shares, rank);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    for (const bool is_last : {false, true}) {  // accumulates twice
      const std::unique_ptr<NoSync> no_sync(is_last ? nullptr : new NoSync(model.no_sync()));
      model
          .run([&] {
            const Tensor scores = x.matmul(parameters[0].t()).tanh().matmul(parameters[1].t());
            return (scores - y).pow(2).sum() / 24.0 * get_world_size();
          })
          .backward();
    }
    optimizer.step();
  }
  return parameters;
}

TEST(DdpParametersTest, of_parameters_without_a_module) {
  const auto of_vector = [](const std::vector<Tensor>& parameters) {
    return DistributedDataParallel(parameters);
  };
  const auto of_names = [](const std::vector<Tensor>& parameters) {
    torch::OrderedDict<std::string, Tensor> named;
    named.insert("encoder.layer.0.weight", parameters[0]);
    named.insert("encoder.layer.1.weight", parameters[1]);
    return DistributedDataParallel(named, {.bucket_cap_mb = 0});
  };
  const auto alone = train_parameters({12}, 0, of_vector);
  for (const Shares& shares : {Shares{6, 6}, Shares{3, 5, 4}, Shares{1, 4, 5, 2}}) {
    on_ranks(static_cast<int>(shares.size()), [&](int rank) {
      const auto mine = train_parameters(shares, rank, of_vector);
      const auto named = train_parameters(shares, rank, of_names);
      for (std::size_t i = 0; i < alone.size(); ++i) {
        EXPECT_LE(difference(mine[i], alone[i]), 1e-9) << i;
        EXPECT_LE(difference(named[i], alone[i]), 1e-9) << i;
      }
    });
  }
}

TEST(DdpParametersTest, of_parameters_that_cannot_be_averaged) {
  on_ranks(2, [](int /*rank*/) {
    const Tensor leaf = at::ones({2}).requires_grad_();
    const auto expect = [](const auto& wrapped, const char* part) {
      const std::string text =
          testing::usage_error([&] { DistributedDataParallel model(wrapped); });
      test::expect_contains(text, part);
      EXPECT_EQ(all_reduce_value(1), 2);  // all ranks refused: the group goes on
    };
    expect(std::vector{leaf, Tensor()}, "parameter 1 is undefined");
    expect(std::vector{leaf, leaf * 2}, "parameter 1 is the result of an operation");
    expect(std::vector{leaf, at::eye(2).to_sparse()}, "parameter 1 is a ");
    torch::OrderedDict<std::string, Tensor> named;
    named.insert("layer.", leaf);
    expect(named, "'layer.' cannot be the name of a parameter");
    torch::OrderedDict<std::string, Tensor> with_two_dots;
    with_two_dots.insert("a..b", leaf);
    expect(with_two_dots, "'a..b' cannot be the name of a parameter");
    expect(std::vector<Tensor>(), "there are no parameters");
    torch::jit::Module empty("Empty");
    empty.define("def forward(self, x):\n  return x\n");
    expect(empty, "the TorchScript module has no parameters");
  });
}

/// One rank gives other parameters, or fewer, or none that can be.
TEST(DdpParametersTest, of_other_parameters_on_a_rank) {
  on_ranks(2, [](int rank) {
    std::vector<Tensor> parameters{at::ones({2}).requires_grad_(), at::ones({3}).requires_grad_()};
    if (rank == 1) parameters.pop_back();
    EXPECT_THROW(DistributedDataParallel model(parameters), MismatchError);
  });
  on_ranks(2, [](int rank) {
    const std::vector<Tensor> parameters{rank == 0 ? at::ones({2}).requires_grad_() : Tensor()};
    try {
      DistributedDataParallel model(parameters);
      barrier();
      ADD_FAILURE() << "no error";
    } catch (const UsageError&) {
      EXPECT_EQ(rank, 1);
      EXPECT_THROW(barrier(), MismatchError);
    } catch (const MismatchError& error) {
      test::expect_contains(error.text(), "parameter 0 is undefined");
    }
  });
}

/// One rank of many, whose peers send again and again what this one sent first.
class EqualPeers final : public Engine {
 public:
  explicit EqualPeers(int size) : size_(size) {}
  std::string_view name() const noexcept override { return "equal peers"; }
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return size_; }
  void run(const Call& call) override {
    if (call.op == Op::all_gather) {
      const std::size_t n_bytes = call.count * size_of(call.dtype);
      for (int r = 0; r < size_; ++r) {
        std::memcpy(static_cast<char*>(call.out) + static_cast<std::size_t>(r) * n_bytes, call.in,
                    n_bytes);
      }
    }
    if (call.op != Op::all_reduce) return;
    const Tensor data =
        at::from_blob(call.out, {static_cast<std::int64_t>(call.count)}, at::kBFloat16);
    if (!first_.defined()) first_ = data.to(at::kFloat);
    data.copy_((first_ * (size_ - 1) + data.to(at::kFloat)) / size_);
  }
  std::unique_ptr<Engine> split(const Call& /*call*/, int /*color*/, int /*key*/) override {
    return std::make_unique<EqualPeers>(size_);
  }
  std::unique_ptr<SharedMemory> allocate(const Call& call) override {
    return std::make_unique<Memory>(call.count);
  }
  void abandon(std::string_view /*reason*/) noexcept override {}
  void leave(std::string_view /*failure*/) noexcept override {}

 private:
  class Memory final : public SharedMemory {
   public:
    explicit Memory(std::size_t n_bytes) : bytes_(n_bytes / 16 + 1) {}
    std::byte* data() const noexcept override {
      return reinterpret_cast<std::byte*>(const_cast<Block*>(bytes_.data()));
    }

   private:
    struct alignas(16) Block {
      std::byte bytes[16];
    };
    std::vector<Block> bytes_;
  };
  int size_;
  Tensor first_;
};

/// bfloat16 has 8 bits: 511 / 512 rounds to 1 in it.
TEST(DdpParametersTest, a_gradient_missing_on_one_of_many_ranks_is_found_in_bf16) {
  struct Net : torch::nn::Module {
    Tensor a = register_parameter("a", at::ones({2}, at::kBFloat16));
    Tensor b = register_parameter("b", at::ones({2}, at::kBFloat16));
    Tensor forward(bool both) { return both ? a.sum() + b.sum() : a.sum(); }
  };
  DistributedDataParallelOptions options;
  options.group = Group(std::make_unique<EqualPeers>(512), "many", testing::kWatchdog);
  DistributedDataParallel model(std::make_shared<Net>(), options);
  model(/*both=*/true).backward();
  model.module()->zero_grad();
  test::expect_contains(test::thrown<MismatchError>([&] { model(/*both=*/false).backward(); }),
                        "parameter b got a gradient on 511 of 512 ranks");
}

}  // namespace ddp_parameters_test
}  // namespace lockstep::nn
