#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <lockstep/group.hpp>
#include <lockstep/nn/distributed_data_parallel.hpp>
#include <string>
#include <utility>
#include <vector>

#include "nn/ddp/call_site.hpp"

namespace lockstep::nn::detail {

/// The gradients of a module in buckets, which are memory that the ranks share, and the hooks that
/// tell of each gradient.
///
/// A bucket holds the gradients of some parameters of one type and, after them, two flags per
/// parameter: 1 and 0 if this rank has a gradient, 0 and 1 if not. The mean that reduces the bucket
/// leaves a flag above zero exactly if some rank set it, whatever the rounding of the type; no
/// second message is needed to find out which parameters have gradients.
///
/// A parameter can lose its gradient accumulator and with it the hook: set_data with a tensor of
/// another type, torch::load and Module::to do that. changed_parameter() finds such changes, and
/// update() rebuilds the parameter list; hooks on the tensors themselves, which nothing removes,
/// reject a gradient that arrives before that.
///
/// A rank that rebuilds its list first enters a barrier in every group that its peers may use next:
/// if their parameters have not changed, one of these groups detects the mismatch.
class GradientBuckets {
 public:
  // libtorch itself keeps a weak reference. The pointer type depends on its version.
  using Accumulator =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    c10::Storage storage;  // held, so that its address is not reused
    Accumulator accumulator;
    std::uintptr_t hook = 0;
    at::Tensor slice;  // its gradient in the bucket
    std::size_t bucket = 0;
    bool ready = false;
    bool has_gradient = false;     // in the step, on this rank
    bool has_accumulated = false;  // some backward since the last averaging gave it a gradient
    bool used = true;              // static graph: false if it got no gradient in the first step
    // Its gradients are sparse: no bytes in the bucket, and a slice without memory of its own.
    bool is_sparse = false;
    // Means of the flags over the ranks, rounded by the bucket's type: above zero if any rank set
    // one.
    double frac_with_grad = 0, frac_without_grad = 0;
  };
  struct Bucket {
    at::ScalarType type = at::kFloat;  // also complex; flags and `gradients` are of its parts
    std::vector<std::size_t> parameters;
    SharedBuffer memory;
    Elements gradients, flags;
    at::Tensor flag_values;  // two flags per parameter: has a gradient, has none
    std::size_t n_pending = 0;
    Work work;
    std::function<void()> complete;  // returned by the communication hook
  };
  /// What the hooks call, in backward.
  struct Callbacks {
    std::function<void(std::size_t parameter)> on_gradient;
    std::function<bool()> is_averaged;  // the backward that runs
  };

  /// of_another: the parameters share the memory of another module of this process, whose object
  /// takes rank 0's values.
  enum class Values { own, of_another };

  /// Empty: see register_parameters().
  GradientBuckets(torch::nn::Module& module, const DistributedDataParallelOptions& options,
                  const CallSite& site, Callbacks callbacks, Values values)
      : module_(module),
        options_(options),
        site_(site),
        callbacks_(std::move(callbacks)),
        values_(values) {}
  ~GradientBuckets() { remove_hooks(); }
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  /// Collective: compares the modules and broadcasts rank 0's values of new parameters.
  void register_parameters();
  /// Collective: makes the buckets of the parameters.
  void allocate();
  /// Both, after a change. Collective: MismatchError if only some ranks call it.
  void update();
  /// In the order in which rank 0's gradients arrived; ready_order: this rank's. Collective, once
  /// after register_parameters(); every rank starts with its current buckets.
  void reorder(std::vector<std::int64_t> ready_order);
  bool is_reordered() const { return is_reordered_; }

  std::vector<Parameter>& parameters() { return parameters_; }
  std::vector<Bucket>& buckets() { return buckets_; }
  std::string names_of(const Bucket& bucket) const;

  /// The name of the first parameter whose hook or bucket is no longer valid, or "".
  std::string changed_parameter() const;
  [[noreturn]] void throw_parameter_changed(const std::string& name) const;
  /// Throws UsageError if another DistributedDataParallel averages a parameter too.
  void check_only_hooks() const;

  /// The parameter's gradient to its bucket, where it stays if it can.
  void copy_to_bucket(Parameter& parameter);
  /// The mean in the bucket to the parameter's gradient.
  void publish_gradient(Parameter& parameter);

 private:
  /// Of a tensor of the module.
  struct ParameterHook {
    at::Tensor tensor;
    unsigned position = 0;
  };
  /// The groups in which a forward may communicate before backward uses this object's group.
  std::vector<Group> groups_of_forward() const;
  void barrier_before_update() const;
  void add_hooks();
  void remove_hooks();
  void check_attached(const Parameter& parameter) const;
  void check_gradient(const Parameter& parameter) const;
  void replace_kept_slice(Parameter& parameter);

  torch::nn::Module& module_;
  const DistributedDataParallelOptions& options_;
  const CallSite& site_;
  const Callbacks callbacks_;
  const Values values_;
  std::vector<Parameter> parameters_;
  std::vector<ParameterHook> parameter_hooks_;
  std::vector<std::int64_t> order_;  // of the parameters in the buckets
  std::vector<Bucket> buckets_;
  bool is_reordered_ = false;
};

/// A tensor over part of a bucket, not a view: optimizers detach gradients in place.
at::Tensor slice_of(const SharedBuffer& memory, std::size_t offset_bytes, at::IntArrayRef sizes,
                    at::IntArrayRef strides, at::ScalarType type);

}  // namespace lockstep::nn::detail
