#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <array>
#include <chrono>
#include <optional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "helpers.hpp"
#include "layer_ranks.hpp"

/// Errors inside a synchronised batch normalisation name the layer and a line of the program.
namespace lockstep::nn::layer_errors_test {
namespace {

using at::Tensor;

std::string at_line(unsigned line) { return "layer_errors_test.cpp:" + std::to_string(line); }

bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void expect_no_library_line(const std::string& text) {
  for (const char* file : {"batch_norm.cpp:", "sync_batch_norm_scope.cpp:", "pimpl.h:",
                           "any_module_holder.h:", "distributed_data_parallel.hpp:"}) {
    EXPECT_FALSE(says(text, file)) << text;
  }
}

/// As users write it: the layer is a typed member, called from a forward of theirs.
struct StemImpl : torch::nn::Cloneable<StemImpl> {
  SyncBatchNorm1d bn = nullptr;
  StemImpl() { reset(); }
  void reset() override { bn = register_module("bn", SyncBatchNorm1d(3)); }
  Tensor forward(const Tensor& x) {
    return bn(x);  // kCall
  }
  static constexpr unsigned kCall = std::source_location::current().line() - 2;
};
TORCH_MODULE(Stem);

/// What the ranks but the last get where that one makes another call.
template <class Make, class Step>
std::vector<std::string> errors_of_others(int n_ranks, const Make& make, const Step& step,
                                          const testing::Run& on = testing::on_ranks) {
  std::vector<std::string> texts(static_cast<std::size_t>(n_ranks));
  on(n_ranks, [&](int rank) {
    auto model = make();
    try {
      step(model, rank);
      ADD_FAILURE() << "no error on rank " << rank;
    } catch (const MismatchError& error) {
      texts[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  return texts;
}

class LayerErrorsOverTest : public testing::LayerTest {};
INSTANTIATE_TEST_SUITE_P(over, LayerErrorsOverTest, ::testing::ValuesIn(testing::over_each()),
                         testing::name_of);

TEST_P(LayerErrorsOverTest, forward_of_a_member_names_the_line_of_its_call) {
  const auto texts = errors_of_others(
      2, [] { return Stem(); },
      [](Stem& net, int rank) {
        if (rank == 1) return default_group().barrier();
        net->forward(at::ones({2, 3}));
      },
      GetParam().run);
  EXPECT_TRUE(says(texts[0], "forward of SyncBatchNorm1d(3)")) << texts[0];
  EXPECT_TRUE(says(texts[0], at_line(StemImpl::kCall))) << texts[0];
  EXPECT_TRUE(says(texts[1], at_line(StemImpl::kCall))) << "the peer's table: " << texts[1];
  expect_no_library_line(texts[0]);
  expect_no_library_line(texts[1]);
}

TEST_P(LayerErrorsOverTest, backward_names_the_layer_and_the_line_of_its_forward) {
  const auto texts = errors_of_others(
      2, [] { return Stem(); },
      [](Stem& net, int rank) {
        const Tensor y = net->forward(at::ones({2, 3}).set_requires_grad(true));
        if (rank == 1) return default_group().barrier();
        y.sum().backward();
      },
      GetParam().run);
  EXPECT_TRUE(says(texts[0], "backward of SyncBatchNorm1d(3)")) << texts[0];
  EXPECT_TRUE(says(texts[0], at_line(StemImpl::kCall))) << texts[0];
  expect_no_library_line(texts[0]);
  expect_no_library_line(texts[1]);
}

unsigned converted_at = 0;

torch::nn::Sequential converted_net() {
  torch::nn::Sequential body(torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3));
  struct NestedImpl : torch::nn::Module {
    torch::nn::Sequential layers;
    explicit NestedImpl(torch::nn::Sequential modules) : layers(std::move(modules)) {
      register_module("layers", layers);
    }
    Tensor forward(const Tensor& x) { return layers->forward(x); }
  };
  torch::nn::Sequential net(torch::nn::ReLU(), std::make_shared<NestedImpl>(body));
  converted_at = std::source_location::current().line() + 1;
  convert_sync_batchnorm(net);
  return net;
}

TEST_P(LayerErrorsOverTest,
       a_converted_layer_has_its_name_in_the_tree_and_the_line_of_the_conversion) {
  const auto texts = errors_of_others(
      2, converted_net,
      [](auto& net, int rank) {
        if (rank == 1) return default_group().barrier();
        net->forward(at::ones({2, 3}));
      },
      GetParam().run);
  EXPECT_TRUE(says(texts[0], "forward of SyncBatchNorm1d '1.layers.1'")) << texts[0];
  EXPECT_TRUE(says(texts[0], at_line(converted_at))) << texts[0];
  expect_no_library_line(texts[0]);
  expect_no_library_line(texts[1]);
}

TEST(LayerErrorsTest, wrong_input_of_a_converted_layer) {
  auto net = converted_net();
  try {
    net->ptr(1)->named_modules()["layers.1"]->as<SyncBatchNorm1d>()->forward(at::ones({2, 4}));
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_TRUE(says(error.what(), "SyncBatchNorm1d '1.layers.1'")) << error.what();
    expect_no_library_line(error.what());
  }
}

TEST(LayerErrorsTest, one_value_per_channel_names_the_layer) {
  auto net = converted_net();
  try {
    net->forward(at::ones({1, 3}));
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_TRUE(says(error.what(), "SyncBatchNorm1d '1.layers.1'")) << error.what();
    EXPECT_TRUE(says(error.what(), at_line(converted_at))) << error.what();
    expect_no_library_line(error.what());
  }
}

TEST(LayerErrorsTest, in_a_sequential_the_line_is_that_of_its_making) {
  unsigned made_at = 0;
  try {
    made_at = std::source_location::current().line() + 1;
    torch::nn::Sequential net(torch::nn::ReLU(), SyncBatchNorm1d(3));
    net->forward(at::ones({1, 3}));
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_TRUE(says(error.what(), "SyncBatchNorm1d(3)")) << error.what();
    EXPECT_TRUE(says(error.what(), at_line(made_at))) << error.what();
    expect_no_library_line(error.what());
  }
}

TEST_P(LayerErrorsOverTest, a_scope_numbers_its_layers_and_has_a_line) {
  unsigned scope_at = 0;
  const auto texts = errors_of_others(
      2, [] { return torch::nn::BatchNorm1d(3); },
      [&](torch::nn::BatchNorm1d& bn, int rank) {
        const unsigned line = std::source_location::current().line() + 1;
        const SyncBatchNormScope scope;
        if (rank == 0) scope_at = line;
        bn(at::ones({2, 3}));
        if (rank == 1) return default_group().barrier();
        bn(at::ones({2, 3}));
      },
      GetParam().run);
  EXPECT_TRUE(says(texts[0], "forward of batch_norm #2 of a SyncBatchNormScope (3 channels)"))
      << texts[0];
  EXPECT_TRUE(says(texts[0], at_line(scope_at))) << texts[0];
  expect_no_library_line(texts[0]);
  expect_no_library_line(texts[1]);
}

TEST(LayerErrorsTest, replicas_are_named_by_their_module) {
  const std::vector<at::Device> two_workers{at::kCPU, at::kCPU};
  Stem net;
  torch::nn::Sequential whole(net);
  DataParallel<torch::nn::Sequential> model(whole, two_workers);
  try {
    model(at::ones({2, 4}));  // each replica gets one row
    FAIL() << "no error";
  } catch (const PeerFailed& error) {
    EXPECT_TRUE(says(error.what(), "SyncBatchNorm1d '0.bn'")) << error.what();
    EXPECT_TRUE(says(error.what(), at_line(StemImpl::kCall))) << error.what();
    expect_no_library_line(error.what());
  }
}

/// Rank 1 leaves instead of the forward of each kind.
TEST(LayerErrorsTest, ddp_names_the_line_of_its_forward) {
  struct NetImpl : torch::nn::Module {
    torch::nn::Linear layer = register_module("layer", torch::nn::Linear(1, 1));
    Tensor forward(const Tensor& x, double factor = 1, const Tensor& added = at::zeros({1})) {
      return layer(x) * factor + added;
    }
  };
  for (const int n_arguments : {1, 2, 3}) {
    std::string text;
    unsigned line = 0;
    const auto body = [&](int rank) {
      DistributedDataParallel model(std::make_shared<NetImpl>());
      if (rank == 1) throw std::out_of_range("no label");
      const Tensor x = at::ones({1, 1});
      Tensor y;
      if (n_arguments == 1) {
        line = std::source_location::current().line() + 1;
        y = model(x);
      } else if (n_arguments == 2) {
        line = std::source_location::current().line() + 1;
        y = model(x, 2);
      } else {
        line = std::source_location::current().line() + 1;
        y = model.forward(x, 2, at::ones({1}));
      }
      try {
        y.sum().backward();
      } catch (const PeerFailed& error) {
        text = error.what();
      }
    };
    EXPECT_THROW(testing::on_ranks(2, body), std::out_of_range);
    EXPECT_TRUE(says(text, "This is DistributedDataParallel")) << text;
    EXPECT_TRUE(says(text, at_line(line))) << text << line;
    expect_no_library_line(text);
  }
}

/// The error that a peer's exception makes keeps its type.
TEST(LayerErrorsTest, types_stay) {
  std::string text;
  const auto body = [&](int rank) {
    Stem net;
    if (rank == 1) throw std::out_of_range("no label");
    try {
      net->forward(at::ones({2, 3}));
    } catch (const PeerFailed& error) {
      text = error.what();
    }
  };
  EXPECT_THROW(testing::on_ranks(2, body), std::out_of_range);
  EXPECT_TRUE(says(text, "SyncBatchNorm1d(3)")) << text;
  EXPECT_TRUE(says(text, "rank 1 failed: no label")) << text;
}

}  // namespace
}  // namespace lockstep::nn::layer_errors_test
