#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <lockstep/error.hpp>
#include <lockstep/lockstep.hpp>
#include <lockstep/nn.hpp>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace lockstep::nn::testing {

/// Layers and wrappers of a rank that outlive its world, of an even number of ranks: used in one,
/// and then in the next one or in none. Batch and statistics are such that the running mean is the
/// mean of rank + 1 over the ranks that shared the batch.
class LayersOfAWorld {
 public:
  /// In the first world. Returns what is wrong.
  std::vector<std::string> use() {
    problems_.clear();
    world_ = default_group();
    const int parity = default_group().rank() % 2;
    half_ = world_->split(parity);
    convert_sync_batchnorm(converted_);
    convert_sync_batchnorm(std::shared_ptr<torch::nn::Module>(typed_));
    explicit_world_ = SyncBatchNorm1d(options().group(*world_));
    explicit_half_ = SyncBatchNorm1d(options().group(*half_));
    expect_mean("unset", unset_, mean_of_world());
    expect_mean("converted", converted(), mean_of_world());
    expect_mean("typed member", typed_->norm, mean_of_world());
    expect_mean("explicit world", explicit_world_, mean_of_world());
    expect_mean("explicit half", explicit_half_, mean_of(parity));
    {
      const double mean = mean_of(parity);
      const GroupScope scope(*half_);
      expect_mean("bound in a scope", scoped_, mean, world_->rank());
    }
    expect_mean("bound in a scope, after it", scoped_, mean_of(parity));
    ddp_.emplace(linear_);
    ddp_->forward(torch::ones({1, 1})).sum().backward();
    optimizer_ = std::make_unique<ZeroRedundancyOptimizer<torch::optim::SGD>>(
        linear_->parameters(), torch::optim::SGDOptions(0.1));
    optimizer_->step();
    expect_samples("sampler", sampler_);
    sampler_.reset();
    torch::serialize::OutputArchive begun;
    sampler_.save(begun);
    std::stringstream bytes;
    begun.save_to(bytes);
    torch::serialize::InputArchive archive;
    archive.load_from(bytes);
    loaded_.load(archive);
    explicit_sampler_.emplace(kSamples, DistributedSamplerOptions{.group = world_});
    half_sampler_.emplace(kSamples, DistributedSamplerOptions{.group = half_});
    return problems_;
  }

  /// In another world.
  std::vector<std::string> use_in_the_next() {
    problems_.clear();
    expect_mean("unset", unset_, mean_of_world());
    expect_mean("converted", converted(), mean_of_world());
    expect_mean("typed member", typed_->norm, mean_of_world());
    expect_mean("explicit world", explicit_world_, mean_of_world());
    expect_mean("bound in a scope", scoped_, mean_of_world());
    const char* const left = "of the world, which this rank has left: split the world again";
    expect_error("explicit half", left, [&] { explicit_half_->forward(batch()); });
    expect_error("default group of before", left, [&] {
      const GroupScope scope(*half_);
      SyncBatchNorm1d(1)->forward(batch());
    });
    const auto plain = [this] {
      torch::nn::BatchNorm1d layer(torch::nn::BatchNormOptions(1).momentum(1));
      layer->forward(batch());
      return layer->running_mean.item<double>();
    };
    {
      const SyncBatchNormScope scope(*world_);
      const double mean = plain();
      if (mean != mean_of_world()) problems_.push_back(fmt::format("scope: {}", mean));
    }
    expect_error("scope of a half", left, [&] {
      const SyncBatchNormScope scope(*half_);
      plain();
    });
    expect_error("DistributedDataParallel", left, [&] { ddp_->forward(torch::ones({1, 1})); });
    expect_error("its gradients", left, [&] { linear_(torch::ones({1, 1})).sum().backward(); });
    expect_error("over a half", left, [&] {
      (void)DistributedDataParallel(torch::nn::Linear(1, 1), {.group = *half_});
    });
    expect_error("ZeroRedundancyOptimizer", left, [&] { optimizer_->step(); });
    expect_error("its consolidation", left, [&] { optimizer_->consolidate(); });
    expect_error("a sampler in its epoch", left, [&] { sampler_.next(1); });
    expect_samples("sampler", sampler_);
    expect_samples("sampler that was loaded before", loaded_);
    expect_samples("explicit sampler", *explicit_sampler_);
    expect_error("sampler of a half", left, [&] { half_sampler_->reset(); });
    ddp_.reset();
    linear_->zero_grad();
    DistributedDataParallel again(linear_, {.group = *world_});
    again.forward(torch::full({1, 1}, 1.0 + get_rank())).sum().backward();
    const double gradient = linear_->weight.grad().item<double>();
    if (gradient != mean_of_world()) problems_.push_back(fmt::format("gradient {}", gradient));

    // A conversion gives all layers its group.
    const int parity = default_group().rank() % 2;
    const Group half = default_group().split(parity);
    for (const auto& model : models()) convert_sync_batchnorm(model, half);
    expect_mean("converted to a half", converted(), mean_of(parity));
    expect_mean("typed member of a half", typed_->norm, mean_of(parity));
    for (const auto& model : models()) convert_sync_batchnorm(model);
    expect_mean("converted again", converted(), mean_of_world());
    expect_mean("typed member again", typed_->norm, mean_of_world());
    // A rebuild of the wrapper's parameters looks at the layers' groups too.
    DistributedDataParallel<Typed> whole(Typed{typed_});
    typed_->norm->weight.set_data(torch::full({1}, 2.0));
    typed_->norm->weight.set_requires_grad(false);
    typed_->norm->weight.set_requires_grad(true);
    whole.forward(batch()).sum().backward();
    return problems_;
  }

  /// When the rank is in no world.
  std::vector<std::string> use_alone() {
    problems_.clear();
    const char* const alone = "of the world, which this rank has left without joining another";
    expect_error("unset", alone, [&] { unset_->forward(batch_of(0)); });
    expect_error("converted", alone, [&] { converted()->forward(batch_of(0)); });
    expect_error("explicit world", alone, [&] { explicit_world_->forward(batch_of(0)); });
    expect_error("explicit half", alone, [&] { explicit_half_->forward(batch_of(0)); });
    expect_error("bound in a scope", alone, [&] { scoped_->forward(batch_of(0)); });
    if (ddp_)
      expect_error("DistributedDataParallel", alone, [&] { ddp_->forward(torch::ones({1, 1})); });
    for (const auto& model : models()) convert_sync_batchnorm(model, Group());
    expect_mean("converted to one rank", converted(), 1, 0);
    unset_->eval();
    unset_->forward(batch_of(0));
    return problems_;
  }

 private:
  struct TypedImpl : torch::nn::Module {
    SyncBatchNorm1d norm{options()};
    TypedImpl() { register_module("norm", norm); }
    at::Tensor forward(const at::Tensor& x) { return norm(x); }
  };
  struct Typed : torch::nn::ModuleHolder<TypedImpl> {
    using Impl = TypedImpl;
    using torch::nn::ModuleHolder<TypedImpl>::ModuleHolder;
  };

  static SyncBatchNormOptions options() { return SyncBatchNormOptions(1).momentum(1); }
  static at::Tensor batch_of(int rank) { return at::full({2, 1}, rank + 1.0); }
  static at::Tensor batch() { return batch_of(get_rank()); }
  static double mean_of_world() { return (get_world_size() + 1) / 2.0; }
  /// Over the ranks of this parity.
  static double mean_of(int parity) { return get_world_size() / 2.0 + parity; }

  SyncBatchNorm1d converted() {
    return std::dynamic_pointer_cast<SyncBatchNorm1dImpl>(converted_->ptr(0));
  }
  std::vector<std::shared_ptr<torch::nn::Module>> models() { return {converted_.ptr(), typed_}; }

  void expect_mean(const char* what, SyncBatchNorm1d layer, double mean,
                   std::optional<int> rank = {}) {
    layer->forward(batch_of(rank ? *rank : get_rank()));
    const double got = layer->running_mean.item<double>();
    if (got != mean) problems_.push_back(fmt::format("{}: {} for {}", what, got, mean));
  }
  /// An epoch of each rank's own samples.
  void expect_samples(const char* what, DistributedSampler& sampler) {
    sampler.reset();
    std::vector<std::size_t> got;
    while (const auto next = sampler.next(3)) got.insert(got.end(), next->begin(), next->end());
    std::vector<std::size_t> all;
    for (const auto& of : all_gather_object(got)) all.insert(all.end(), of.begin(), of.end());
    std::ranges::sort(all);
    std::vector<std::size_t> expected(kSamples);
    std::iota(expected.begin(), expected.end(), 0);
    if (all != expected) problems_.push_back(fmt::format("{}: {}", what, fmt::join(all, " ")));
  }
  template <class F>
  void expect_error(const char* what, const std::string& part, F f) {
    try {
      f();
      problems_.push_back(fmt::format("{}: no error", what));
    } catch (const UsageError& error) {
      if (error.text().find(part) == std::string::npos)
        problems_.push_back(fmt::format("{}: {}", what, error.text()));
    } catch (const Error& error) {
      problems_.push_back(fmt::format("{}: no UsageError: {}", what, error.what()));
    }
  }

  std::optional<Group> world_, half_;
  SyncBatchNorm1d unset_{options()}, scoped_{options()};
  SyncBatchNorm1d explicit_world_{nullptr}, explicit_half_{nullptr};
  torch::nn::Sequential converted_{
      torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(1).momentum(1))};
  std::shared_ptr<TypedImpl> typed_ = std::make_shared<TypedImpl>();
  torch::nn::Linear linear_{1, 1};
  std::optional<DistributedDataParallel<torch::nn::Linear>> ddp_;
  static constexpr std::size_t kSamples = 13;
  std::unique_ptr<ZeroRedundancyOptimizer<torch::optim::SGD>> optimizer_;
  DistributedSampler sampler_{kSamples}, loaded_{kSamples};
  std::optional<DistributedSampler> explicit_sampler_, half_sampler_;
  std::vector<std::string> problems_;
};

}  // namespace lockstep::nn::testing
