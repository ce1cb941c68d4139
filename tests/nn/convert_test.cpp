#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <string>

#include "helpers.hpp"

namespace lockstep::nn {
namespace {

using at::Tensor;
using testing::Random;
using ModulePtr = std::shared_ptr<torch::nn::Module>;

/// Sequential has no plain forward, so that nesting needs a class: as users write it.
struct BlockImpl : torch::nn::SequentialImpl {
  using torch::nn::SequentialImpl::SequentialImpl;
  Tensor forward(Tensor x) { return torch::nn::SequentialImpl::forward(x); }
};
TORCH_MODULE(Block);

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(
      torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4),
      Block(torch::nn::ReLU(),
            torch::nn::BatchNorm2d(torch::nn::BatchNormOptions(4).eps(1e-3).affine(false))),
      torch::nn::Flatten(), torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(16).momentum(0.3)));
}

template <class T>
bool same_handles(const torch::OrderedDict<std::string, T>& a,
                  const torch::OrderedDict<std::string, T>& b) {
  if (a.keys() != b.keys()) return false;
  for (const auto& item : a) {
    if (!b[item.key()].is_same(item.value())) return false;
  }
  return true;
}

template <class M>
int count(const torch::nn::Module& module) {
  int n = 0;
  for (const auto& child : module.modules()) n += child->as<M>() != nullptr;
  return n;
}

TEST(ConvertTest, there_and_back_loses_nothing) {
  auto net = make_net();
  net->to(at::kDouble);
  net->ptr(1)->as<torch::nn::BatchNorm2d>()->weight.requires_grad_(false);
  net->ptr(4)->eval();
  const Tensor x = Random(1).normal({3, 3, 4, 4});
  net->forward(x);
  const auto parameters = net->named_parameters();
  const auto buffers = net->named_buffers();

  const ModulePtr same = convert_sync_batchnorm(net);
  EXPECT_EQ(same.get(), net.get());
  EXPECT_EQ(count<torch::nn::BatchNorm2d>(*net) + count<torch::nn::BatchNorm1d>(*net), 0);
  EXPECT_EQ(count<SyncBatchNorm2d>(*net), 2);
  EXPECT_EQ(count<SyncBatchNorm1d>(*net), 1);
  EXPECT_TRUE(same_handles(parameters, net->named_parameters()));
  EXPECT_TRUE(same_handles(buffers, net->named_buffers()));
  EXPECT_EQ(net->ptr(1), net->named_children()["1"]);  // what Sequential runs and what it lists
  const auto* const one = net->ptr(1)->as<SyncBatchNorm2d>();
  EXPECT_TRUE(one->weight.is_same(parameters["1.weight"]));
  EXPECT_FALSE(one->weight.requires_grad());
  EXPECT_TRUE(one->is_training());
  const auto* const four = net->ptr(4)->as<SyncBatchNorm1d>();
  EXPECT_FALSE(four->is_training());
  EXPECT_EQ(four->options.momentum(), 0.3);
  const auto* const inner = net->ptr<BlockImpl>(2)->ptr(1)->as<SyncBatchNorm2d>();
  EXPECT_EQ(inner->options.eps(), 1e-3);
  EXPECT_FALSE(inner->options.affine());

  const Tensor synchronised = net->forward(x);
  EXPECT_EQ(buffers["1.num_batches_tracked"].item<std::int64_t>(), 2);
  revert_sync_batchnorm(net);
  EXPECT_EQ(count<torch::nn::BatchNorm2d>(*net), 2);
  EXPECT_EQ(count<SyncBatchNorm2d>(*net) + count<SyncBatchNorm1d>(*net), 0);
  EXPECT_TRUE(same_handles(parameters, net->named_parameters()));
  EXPECT_TRUE(same_handles(buffers, net->named_buffers()));
  EXPECT_FALSE(net->ptr(4)->is_training());
  EXPECT_EQ(net->ptr(4)->as<torch::nn::BatchNorm1d>()->options.momentum().value(), 0.3);
  EXPECT_LE(testing::difference(net->forward(x), synchronised), 1e-12);
}

TEST(ConvertTest, cumulative_momentum_goes_there_and_back) {
  auto options = torch::nn::BatchNormOptions(3);
  options.momentum().reset();
  const auto sync = convert_sync_batchnorm(torch::nn::BatchNorm3d(options));
  ASSERT_TRUE(sync->as<SyncBatchNorm3d>());
  EXPECT_FALSE(sync->as<SyncBatchNorm3d>()->options.momentum().has_value());
  const auto back = revert_sync_batchnorm(sync);
  ASSERT_TRUE(back->as<torch::nn::BatchNorm3d>());
  EXPECT_FALSE(back->as<torch::nn::BatchNorm3d>()->options.momentum().has_value());
}

TEST(ConvertTest, root_is_replaced) {
  torch::nn::BatchNorm1d bn(3);
  const auto converted = convert_sync_batchnorm(bn);
  ASSERT_TRUE(converted->as<SyncBatchNorm1d>());
  EXPECT_TRUE(converted->named_parameters()["weight"].is_same(bn->weight));
  EXPECT_EQ(convert_sync_batchnorm(converted), converted);  // nothing left to convert
  EXPECT_TRUE(revert_sync_batchnorm(converted)->as<torch::nn::BatchNorm1d>());
}

TEST(ConvertTest, shared_modules_stay_shared) {
  const torch::nn::BatchNorm2d shared(3);
  torch::nn::Sequential net(shared, torch::nn::ReLU(), shared, Block(shared));
  convert_sync_batchnorm(net);
  EXPECT_TRUE(net->ptr(0)->as<SyncBatchNorm2d>());
  EXPECT_EQ(net->ptr(0), net->ptr(2));
  EXPECT_EQ(net->ptr(0), net->ptr<BlockImpl>(3)->ptr(0));
  revert_sync_batchnorm(net);
  EXPECT_EQ(net->ptr(0), net->ptr(2));
}

TEST(ConvertTest, lists_and_dicts) {
  torch::nn::ModuleList list;
  list->push_back(torch::nn::BatchNorm2d(3));
  list->insert(0, torch::nn::ReLU());  // registration order is not index order
  torch::nn::ModuleDict dict;
  dict->update(std::vector<std::pair<std::string, ModulePtr>>{
      {"bn", torch::nn::BatchNorm1d(3).ptr()}, {"list", list.ptr()}});
  convert_sync_batchnorm(dict);
  EXPECT_TRUE((*dict)["bn"]->as<SyncBatchNorm1d>());
  EXPECT_EQ((*dict)["bn"], dict->named_children()["bn"]);
  EXPECT_TRUE((*list)[1]->as<SyncBatchNorm2d>());
  EXPECT_EQ((*list)[1], list->named_children()["1"]);
  EXPECT_FALSE((*list)[0]->as<SyncBatchNorm2d>());
}

struct TypedImpl : torch::nn::Module {
  torch::nn::BatchNorm2d bn{3};
  torch::nn::Sequential layers{torch::nn::BatchNorm2d(3)};
  TypedImpl() {
    register_module("bn", bn);
    register_module("layers", layers);
  }
  Tensor forward(Tensor x) { return layers->forward(bn(x)); }
};

TEST(ConvertTest, what_cannot_be_replaced_is_named_and_nothing_is) {
  torch::nn::Sequential net(torch::nn::BatchNorm2d(3), std::make_shared<TypedImpl>());
  try {
    convert_sync_batchnorm(net);
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_NE(error.text().find("cannot replace '1.bn' (torch::nn::BatchNorm2dImpl): "),
              std::string::npos)
        << error.text();
    for (const char* way :
         {"torch::nn::Sequential", "SyncBatchNorm2d member", "SyncBatchNormScope"}) {
      EXPECT_NE(error.text().find(way), std::string::npos) << error.text();
    }
  }
  EXPECT_EQ(count<SyncBatchNorm2d>(*net), 0);
}

struct MineImpl : SyncBatchNorm2dImpl {  // torch's own cannot be derived from: not all is exported
  using SyncBatchNorm2dImpl::SyncBatchNorm2dImpl;
  Tensor forward(Tensor x) { return x; }
};

TEST(ConvertTest, a_class_derived_from_it_is_not_replaced) {
  torch::nn::Sequential net(SyncBatchNorm2d(3), std::make_shared<MineImpl>(3));
  EXPECT_THROW(revert_sync_batchnorm(net), UsageError);
  EXPECT_EQ(count<SyncBatchNorm2d>(*net), 2);
}

TEST(ConvertTest, a_members_sequential_is_converted_in_place) {
  struct NetImpl : torch::nn::Module {
    torch::nn::Sequential layers{torch::nn::BatchNorm2d(3)};
    NetImpl() { register_module("layers", layers); }
  };
  const auto net = std::make_shared<NetImpl>();
  convert_sync_batchnorm(ModulePtr(net));
  EXPECT_TRUE(net->layers->ptr(0)->as<SyncBatchNorm2d>());
}

TEST(ConvertTest, a_data_parallel_is_converted_in_place) {
  torch::nn::Sequential net(torch::nn::BatchNorm1d(3), torch::nn::ReLU(),
                            torch::nn::BatchNorm1d(3));
  DataParallel<torch::nn::Sequential> model(net, {at::kCPU, at::kCPU});
  const Tensor x = Random(2).normal({4, 3}, at::kFloat);
  model(x);  // the copies are those of before
  EXPECT_EQ(convert_sync_batchnorm(model).get(), net.get());
  EXPECT_EQ(count<SyncBatchNorm1d>(*net), 2);
  net->ptr(0)->as<SyncBatchNorm1d>()->reset_running_stats();
  model(x);
  EXPECT_LE(testing::difference(net->ptr(0)->as<SyncBatchNorm1d>()->running_mean, x.mean(0) * 0.1),
            1e-6)
      << "of the whole batch";
  revert_sync_batchnorm(model);
  EXPECT_EQ(count<SyncBatchNorm1d>(*net), 0);
  model(x);

  DataParallel<torch::nn::BatchNorm1d> itself(torch::nn::BatchNorm1d(3), {at::kCPU, at::kCPU});
  EXPECT_THROW(convert_sync_batchnorm(itself), UsageError);
  itself(x);
}

TEST(ConvertTest, no_module_is_reported) {
  EXPECT_THROW(convert_sync_batchnorm(ModulePtr()), UsageError);
}

}  // namespace
}  // namespace lockstep::nn
