#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/error.hpp>
#include <lockstep/nn.hpp>

#include <string>

#include "helpers.hpp"
#include "layer_ranks.hpp"
#include "support/expect.hpp"

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
    test::expect_contains(error.text(), "cannot replace '1.bn' (torch::nn::BatchNorm2dImpl): ");
    for (const char* way :
         {"torch::nn::Sequential", "SyncBatchNorm2d member", "SyncBatchNormScope"}) {
      test::expect_contains(error.text(), way);
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

struct StackImpl : torch::nn::SequentialImpl {
  StackImpl() {
    head = register_module("head", torch::nn::Sequential(torch::nn::BatchNorm1d(4)));
    push_back("lin", torch::nn::Linear(4, 4));
    push_back("bn", torch::nn::BatchNorm1d(4));
  }
  torch::nn::Sequential head{nullptr};
};
struct ListImpl : torch::nn::ModuleListImpl {
  ListImpl() {
    head = register_module("head", torch::nn::Sequential(torch::nn::BatchNorm1d(4)));
    push_back(torch::nn::Linear(4, 4));
    push_back(torch::nn::BatchNorm1d(4));
  }
  torch::nn::Sequential head{nullptr};
};
struct DictImpl : torch::nn::ModuleDictImpl {
  DictImpl() {
    head = register_module("head", torch::nn::Sequential(torch::nn::BatchNorm1d(4)));
    update(std::vector<std::pair<std::string, ModulePtr>>{{"lin", torch::nn::Linear(4, 4).ptr()},
                                                          {"bn", torch::nn::BatchNorm1d(4).ptr()}});
  }
  torch::nn::Sequential head{nullptr};
};

/// Child `linear` is left alone; `norm` and "head.0" are of type M.
template <class M>
void expect_types(const torch::nn::Module& net, const char* linear, const char* norm) {
  const auto modules = net.named_modules();
  EXPECT_TRUE(modules[linear]->as<torch::nn::Linear>()) << modules[linear]->name();
  EXPECT_TRUE(modules[norm]->as<M>()) << modules[norm]->name();
  EXPECT_TRUE(modules["head.0"]->as<M>()) << modules["head.0"]->name();
}

TEST(ConvertTest, containers_with_children_of_their_own) {
  const auto stack = std::make_shared<StackImpl>();
  convert_sync_batchnorm(ModulePtr(stack));
  expect_types<SyncBatchNorm1d>(*stack, "lin", "bn");
  EXPECT_TRUE(stack->ptr(1)->as<SyncBatchNorm1d>());
  EXPECT_EQ(stack->forward(at::ones({3, 4})).size(0), 3);
  revert_sync_batchnorm(ModulePtr(stack));
  expect_types<torch::nn::BatchNorm1d>(*stack, "lin", "bn");

  const auto list = std::make_shared<ListImpl>();
  convert_sync_batchnorm(ModulePtr(list));
  expect_types<SyncBatchNorm1d>(*list, "0", "1");
  EXPECT_TRUE(list->ptr(1)->as<SyncBatchNorm1d>());
  revert_sync_batchnorm(ModulePtr(list));
  expect_types<torch::nn::BatchNorm1d>(*list, "0", "1");

  const auto dict = std::make_shared<DictImpl>();
  convert_sync_batchnorm(ModulePtr(dict));
  expect_types<SyncBatchNorm1d>(*dict, "lin", "bn");
  EXPECT_TRUE((*dict)["bn"]->as<SyncBatchNorm1d>());
  revert_sync_batchnorm(ModulePtr(dict));
  expect_types<torch::nn::BatchNorm1d>(*dict, "lin", "bn");
}

/// Children of its own that no entry of the container holds.
template <class Container>
struct WithMember : Container {
  WithMember() { this->register_module("own", own); }
  torch::nn::BatchNorm1d own{4};
};

TEST(ConvertTest, a_containers_own_layer_cannot_be_replaced) {
  for (const ModulePtr& net :
       {ModulePtr(std::make_shared<WithMember<torch::nn::SequentialImpl>>()),
        ModulePtr(std::make_shared<WithMember<torch::nn::ModuleListImpl>>()),
        ModulePtr(std::make_shared<WithMember<torch::nn::ModuleDictImpl>>())}) {
    const std::string text = testing::usage_error([&net] { convert_sync_batchnorm(net); });
    test::expect_contains(text, "cannot replace 'own'");
    EXPECT_EQ(count<torch::nn::BatchNorm1d>(*net), 1);
  }
}

TEST(ConvertTest, what_a_batch_norm_cannot_compute_is_not_reverted_in_training) {
  const auto make = [](EpsMode mode, OnNonfinite on_nonfinite) {
    return torch::nn::Sequential(
        SyncBatchNorm1d(3),
        SyncBatchNorm1d(SyncBatchNormOptions(3).eps_mode(mode).on_nonfinite(on_nonfinite)));
  };
  auto clamp = make(EpsMode::clamp, OnNonfinite::propagate);
  std::string text = testing::usage_error([&] { revert_sync_batchnorm(clamp); });
  for (const char* part : {"'1'", "eps_mode", "eval()"}) {
    test::expect_contains(text, part);
  }
  EXPECT_EQ(count<SyncBatchNorm1d>(*clamp), 2);
  const torch::nn::Sequential keep = make(EpsMode::plus, OnNonfinite::keep_running_stats);
  text = testing::usage_error([&] { revert_sync_batchnorm(keep); });
  test::expect_contains(text, "on_nonfinite");
  EXPECT_NE(testing::usage_error([&] { revert_sync_batchnorm(clamp->ptr(1)); }), "no error");

  clamp->eval();
  const Tensor x = Random(1).normal({4, 3}, at::kFloat);
  const Tensor expected = clamp->forward(x);
  revert_sync_batchnorm(clamp);
  EXPECT_EQ(count<torch::nn::BatchNorm1d>(*clamp), 2);
  EXPECT_LE(testing::difference(clamp->forward(x), expected), 1e-6);
}

class ConvertedLayerTest : public testing::LayerTest {};
INSTANTIATE_TEST_SUITE_P(over, ConvertedLayerTest, ::testing::ValuesIn(testing::over_each()),
                         testing::name_of);

TEST_P(ConvertedLayerTest, a_clone_synchronises_over_the_same_group) {
  on(4, [](int rank) {
    const Group half = default_group().split(rank % 2);
    torch::nn::Sequential net(torch::nn::BatchNorm1d(3), torch::nn::ReLU());
    convert_sync_batchnorm(net, half);
    const torch::nn::Sequential copy(
        std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone()));
    auto* const layer = copy->ptr(0)->as<SyncBatchNorm1d>();
    ASSERT_TRUE(layer);
    ASSERT_TRUE(layer->options.group().has_value());
    EXPECT_EQ(layer->options.group()->name(), half.name());
    const Tensor x = Random(static_cast<std::uint64_t>(rank)).normal({4, 3}, at::kFloat);
    const Tensor expected = net->forward(x);
    EXPECT_EQ(testing::difference(torch::nn::Sequential(copy)->forward(x), expected), 0);
    EXPECT_EQ(testing::difference(copy->named_buffers()["0.running_mean"],
                                  net->named_buffers()["0.running_mean"]),
              0);
    EXPECT_FALSE(copy->named_parameters()["0.weight"].is_same(net->named_parameters()["0.weight"]));
  });
}

TEST(ConvertTest, no_module_is_reported) {
  EXPECT_THROW(convert_sync_batchnorm(ModulePtr()), UsageError);
}

}  // namespace
}  // namespace lockstep::nn
