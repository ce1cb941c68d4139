#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "helpers.hpp"

/// Against what one process of Python PyTorch 2.13 computed (scripts/make_batch_norm_reference.py).
namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::difference;
using testing::on_ranks;
using testing::share_of;
using testing::Shares;
using Tensors = std::map<std::string, Tensor>;

/// What Python's torch.save wrote: a dict of tensors.
Tensors load_python(const std::string& name) {
  std::ifstream file(std::string(LOCKSTEP_TEST_DATA) + "/" + name, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open the test data " + name);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  Tensors tensors;
  for (const auto& item : torch::pickle_load(bytes).toGenericDict()) {
    tensors[item.key().toStringRef()] = item.value().toTensor();
  }
  return tensors;
}

Tensor laid_out(const Tensor& tensor, const std::string& form) {
  if (form == "nhwc" || form == "ndhwc") return testing::channels_last(tensor);
  if (form == "strided") return testing::strided(tensor);
  return tensor;
}

struct Expected {
  Tensors all;
  std::string form, type;
  const Tensor& operator[](const std::string& key) const {
    return all.at(form + "." + type + "." + key);
  }
  double tolerance() const { return type == "f64" ? 1e-12 : type == "f32" ? 1e-5 : 2e-2; }
  void expect_near(const Tensor& got, const std::string& key) const {
    const Tensor& expected = (*this)[key];
    EXPECT_EQ(got.sizes(), expected.sizes()) << key;
    // Module::to of C++ converts this one too.
    if (key != "num_batches_tracked") {
      EXPECT_EQ(got.scalar_type(), expected.scalar_type()) << key;
    }
    const double scale = std::max(1.0, testing::largest(expected.to(at::kDouble)));
    EXPECT_LE(difference(got, expected), tolerance() * scale) << key;
  }
};

template <class Holder>
void reproduce(const Expected& expected, const Shares& shares) {
  std::vector<Tensor> outputs(shares.size()), input_gradients(shares.size());
  on_ranks(static_cast<int>(shares.size()), [&](int rank) {
    const Tensor& whole = expected["x"];
    Holder bn(SyncBatchNormOptions(whole.size(1)));
    bn->to(expected["weight"].scalar_type());
    torch::optim::SGD optimizer(bn->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const Tensor x = laid_out(share_of(whole, shares, rank).contiguous(), expected.form).detach();
    x.requires_grad_();
    const Tensor target = share_of(expected["target"], shares, rank).to(bn->weight.scalar_type());
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      x.mutable_grad().reset();
      const Tensor y = bn->forward(x);
      ((y.to(target.scalar_type()) - target).square().sum() / whole.numel()).backward();
      for (const auto& parameter : bn->parameters()) {
        all_reduce(parameter.mutable_grad(), ReduceOp::sum);
      }
      if (step == 0) {
        outputs[static_cast<std::size_t>(rank)] = y.detach();
        input_gradients[static_cast<std::size_t>(rank)] = x.grad().clone();
        expected.expect_near(bn->weight.grad(), "dweight");
        expected.expect_near(bn->bias.grad(), "dbias");
        if (expected.form == "nhwc" || expected.form == "ndhwc") {
          EXPECT_TRUE(testing::is_channels_last(y));
          EXPECT_TRUE(testing::is_channels_last(x.grad()));
        }
      }
      optimizer.step();
    }
    for (const char* key : {"weight", "bias"}) {
      expected.expect_near(bn->named_parameters()[key].detach(), key);
    }
    for (const char* key : {"running_mean", "running_var", "num_batches_tracked"}) {
      expected.expect_near(bn->named_buffers()[key], key);
    }
  });
  expected.expect_near(at::cat(outputs), "y");
  expected.expect_near(at::cat(input_gradients), "dx");
}

class PythonReferenceTest
    : public ::testing::TestWithParam<std::tuple<const char*, const char*, Shares>> {};

TEST_P(PythonReferenceTest, ranks_equal_one_process) {
  const auto& [form, type, shares] = GetParam();
  const Expected expected{load_python("batch_norm_reference.pt"), form, type};
  switch (expected["x"].dim()) {
    case 5: reproduce<SyncBatchNorm3d>(expected, shares); break;
    case 4: reproduce<SyncBatchNorm2d>(expected, shares); break;
    default: reproduce<SyncBatchNorm1d>(expected, shares); break;
  }
}

INSTANTIATE_TEST_SUITE_P(
    all, PythonReferenceTest,
    ::testing::Combine(::testing::Values("nc", "ncl", "nchw", "nhwc", "strided", "ncdhw", "ndhwc"),
                       ::testing::Values("f64", "f32", "bf16", "f16"),
                       ::testing::Values(Shares{5, 3}, Shares{3, 4, 1}, Shares{2, 0, 5, 1})),
    [](const auto& test) {
      return fmt::format("{}_{}_{}_ranks", std::get<0>(test.param), std::get<1>(test.param),
                         std::get<2>(test.param).size());
    });

torch::nn::Sequential checkpointed_net() {
  return torch::nn::Sequential(torch::nn::Conv2d(2, 3, 3), torch::nn::BatchNorm2d(3),
                               torch::nn::Flatten(), torch::nn::BatchNorm1d(12));
}

Tensors named_state(const torch::nn::Module& module) {
  Tensors state;
  for (const auto& item : module.named_parameters()) state[item.key()] = item->detach();
  for (const auto& item : module.named_buffers()) state[item.key()] = *item;
  return state;
}

TEST(PythonCheckpointTest, fits_sync_batch_norm_by_name_shape_and_type) {
  const Tensors checkpoint = load_python("batch_norm_checkpoint.pt");
  auto net = checkpointed_net();
  convert_sync_batchnorm(net);
  const Tensors state = named_state(*net);
  ASSERT_EQ(state.size(), checkpoint.size());
  for (auto [name, tensor] : state) {
    ASSERT_TRUE(checkpoint.count(name)) << name;
    EXPECT_EQ(tensor.sizes(), checkpoint.at(name).sizes()) << name;
    EXPECT_EQ(tensor.scalar_type(), checkpoint.at(name).scalar_type()) << name;
    const at::NoGradGuard no_grad;
    tensor.copy_(checkpoint.at(name));
  }
  EXPECT_EQ(state.at("1.num_batches_tracked").item<std::int64_t>(), 3);

  // And in the other direction, in evaluation as in state.
  std::stringstream stream;
  torch::save(net, stream);
  auto plain = checkpointed_net();
  torch::load(plain, stream);
  for (const auto& [name, tensor] : named_state(*plain)) {
    EXPECT_TRUE(tensor.equal(checkpoint.at(name))) << name;
  }
  net->eval();
  plain->eval();
  const Tensor x = testing::Random(1).normal({4, 2, 4, 4}, at::kFloat);
  EXPECT_TRUE(net->forward(x).equal(plain->forward(x)));
}

}  // namespace
}  // namespace lockstep::nn
