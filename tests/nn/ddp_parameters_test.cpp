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

namespace lockstep::nn {
namespace ddp_parameters_test {

using at::Tensor;
using testing::on_ranks;
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
        EXPECT_NE(error.text().find("parameter "), std::string::npos) << error.what();
        EXPECT_NE(error.text().find("forward"), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("ddp_parameters_test.cpp"), std::string::npos);
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
        EXPECT_NE(text.find("updating parameter "), std::string::npos) << text;
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
      try {
        backward(net, rank, forward);
        ADD_FAILURE() << "no error";
      } catch (const UsageError& error) {
        EXPECT_NE(error.text().find("another DistributedDataParallel"), std::string::npos)
            << error.what();
      }
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
struct ScriptImpl : torch::nn::Module {
  torch::jit::Module script;
  explicit ScriptImpl(torch::jit::Module module) : script(std::move(module)) {
    for (const auto& parameter : script.named_parameters()) {
      std::string name = parameter.name;
      std::ranges::replace(name, '.', '_');
      register_parameter(name, parameter.value, parameter.value.requires_grad());
    }
  }
  Tensor forward(const Tensor& x) { return script.forward({x}).toTensor(); }
};
TORCH_MODULE(Script);

TEST(DdpParametersTest, of_a_torch_script_module) {
  static_assert(!ModuleHandle<torch::jit::Module>);
  on_ranks(2, [](int rank) {
    torch::jit::Module script("Scripted");
    script.register_parameter("weight", at::full({1}, rank + 1.0).requires_grad_(), false);
    script.define("def forward(self, x):\n  return x * self.weight\n");
    DistributedDataParallel model(Script{script});
    model(at::full({1}, rank + 1.0)).sum().backward();
    const Tensor weight = script.attr("weight").toTensor();
    EXPECT_EQ(weight.item<double>(), 1) << "rank 0's";
    EXPECT_EQ(weight.grad().item<double>(), 1.5);
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
  try {
    model(/*both=*/false).backward();
    ADD_FAILURE() << "no error";
  } catch (const MismatchError& error) {
    EXPECT_NE(error.text().find("parameter b got a gradient on 511 of 512 ranks"),
              std::string::npos)
        << error.text();
  }
}

}  // namespace ddp_parameters_test
}  // namespace lockstep::nn
