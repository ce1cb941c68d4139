#include "nn/ddp/gradient_buckets.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <chrono>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/sync_batch_norm.hpp>
#include <lockstep/nn/sync_batch_norm_scope.hpp>
#include <lockstep/nn/tensor_ops.hpp>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <unordered_set>
#include <utility>

#include "group/check.hpp"
#include "nn/ddp/same_module.hpp"
#include "nn/elements/dense.hpp"
#include "nn/elements/elements.hpp"
#include "world/session.hpp"

namespace lockstep::nn::detail {
namespace {

constexpr std::size_t kAlignment = 64;  // of a gradient in its bucket, in bytes

class GradientHook : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(GradientBuckets& buckets, const std::function<void(std::size_t)>& on_gradient,
               std::size_t index)
      : buckets_(buckets), on_gradient_(on_gradient), index_(index) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    on_gradient_(index_);
    return outputs;
  }
  bool belongs_to(const GradientBuckets& buckets) const { return &buckets == &buckets_; }

 private:
  GradientBuckets& buckets_;  // removes its hooks before its destruction
  const std::function<void(std::size_t)>& on_gradient_;
  std::size_t index_;
};

/// The padded size of a parameter's gradient in a bucket.
std::size_t n_bytes_of(const at::Tensor& tensor, bool is_sparse) {
  return is_sparse ? 0 : (tensor.nbytes() + kAlignment - 1) / kAlignment * kAlignment;
}

/// Returns an empty Storage for a sparse tensor: set_data may make a parameter sparse.
c10::Storage storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage() : c10::Storage();
}

}  // namespace

at::Tensor slice_of(const SharedBuffer& memory, std::size_t offset_bytes, at::IntArrayRef sizes,
                    at::IntArrayRef strides, at::ScalarType type) {
  return at::from_blob(
      memory.data() + offset_bytes, sizes, strides, [memory](void*) {}, at::TensorOptions(type));
}

std::string GradientBuckets::names_of(const Bucket& bucket) const {
  const std::string& first = parameters_[bucket.parameters.front()].name;
  const std::string& last = parameters_[bucket.parameters.back()].name;
  const std::string names = first == last ? first : first + " to " + last;
  return fmt::format("{} (bucket {} of {})", names, &bucket - buckets_.data() + 1, buckets_.size());
}

std::string GradientBuckets::changed_parameter() const {
  auto next = parameters_.begin();  // nearly always in the same order
  for (const auto& item : module_.named_parameters()) {
    if (!item->requires_grad()) continue;
    const auto is_it = [&](const Parameter& p) { return p.tensor.is_same(*item); };
    if (next == parameters_.end() || !is_it(*next)) {
      next = std::find_if(parameters_.begin(), parameters_.end(), is_it);
    }
    if (next == parameters_.end()) return item.key();
    if (torch::autograd::impl::try_get_grad_accumulator(*item) != next->accumulator ||
        item->scalar_type() != next->slice.scalar_type() || item->sizes() != next->slice.sizes() ||
        storage_of(*item).unsafeGetStorageImpl() != next->storage.unsafeGetStorageImpl()) {
      return item.key();
    }
    ++next;
  }
  return {};
}

void GradientBuckets::throw_parameter_changed(const std::string& name) const {
  throw UsageError(
      site_.context(),
      fmt::format("parameter {} has changed (torch::load, to(), set_data, requires_grad_) since "
                  "the last synchronised forward of DistributedDataParallel: after a change, call "
                  "its forward, not that of the wrapped module",
                  name));
}

void GradientBuckets::check_only_hooks() const {
  for (const Parameter& parameter : parameters_) {
    for (const auto& hook : parameter.accumulator->post_hooks()) {
      const auto* const other = dynamic_cast<const GradientHook*>(hook.get());
      if (other == nullptr || other->belongs_to(*this)) continue;
      throw UsageError(site_.context(),
                       fmt::format("parameter {} is in another DistributedDataParallel too, and "
                                   "both would average its gradient: keep one of them",
                                   parameter.name));
    }
  }
}

/// Runs before each gradient of the parameter, whatever accumulates it.
void GradientBuckets::check_attached(const Parameter& parameter) const {
  if (!callbacks_.is_averaged()) return;
  const auto now = torch::autograd::impl::try_get_grad_accumulator(parameter.tensor);
  if (now == parameter.accumulator) return;
  if (!now && parameter.accumulator.use_count() > 1) return;  // a graph from before the change
  throw_parameter_changed(parameter.name);
}

std::vector<Group> GradientBuckets::groups_of_forward() const {
  std::vector<Group> groups;
  const auto add = [&](const Group& group) {
    // In a larger group some ranks do not have this module.
    if (group.size() == 1 || group.size() > site_.group.size()) return;
    if (std::ranges::find(groups, group) == groups.end()) groups.push_back(group);
  };
  for (const auto& module : module_.modules()) {
    const auto* const layer = dynamic_cast<const NamedLayer*>(module.get());
    if (layer != nullptr) add(layer->present_group(site_.where));
  }
  if (const auto scope = SyncBatchNormScope::active()) {
    add(scope->group ? internal::follow_world(*scope->group, site_.context()) : default_group());
  }
  return groups;
}

/// In all groups at once: the one the peers use next, if any, is unknown here.
void GradientBuckets::barrier_before_update() const {
  std::vector<Work> barriers;
  for (const Group& group : groups_of_forward())
    barriers.push_back(group.barrier_async({}, site_.where));
  if (barriers.empty()) return;  // the peers' next call is in this object's group
  barriers.push_back(site_.group.barrier_async({}, site_.where));
  while (!barriers.empty()) {
    const auto done = std::ranges::find_if(barriers, &Work::done);
    if (done == barriers.end()) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      continue;
    }
    done->wait();
    barriers.erase(done);
  }
}

void GradientBuckets::update() {
  barrier_before_update();
  register_parameters();
  allocate();
}

void GradientBuckets::register_parameters() {
  check_module(module_, site_.group, site_.context());
  remove_hooks();
  const auto known = std::move(parameters_);
  parameters_.clear();
  order_.clear();
  is_reordered_ = false;
  std::unordered_set<const void*> taken;
  const auto sparse = sparse_parameters(module_);
  for (const auto& item : module_.named_parameters()) {
    if (!taken.insert(item->unsafeGetTensorImpl()).second) continue;  // has an earlier name too
    const auto before = std::find_if(known.begin(), known.end(),
                                     [&](const Parameter& p) { return p.tensor.is_same(*item); });
    const bool is_same = before != known.end() && before->storage.unsafeGetStorageImpl() ==
                                                      storage_of(*item).unsafeGetStorageImpl();
    at::Tensor tensor = values_ == Values::own ? *item : at::empty_like(*item);
    if (!is_same) broadcast(tensor, /*src=*/0, site_.group, {}, site_.where);
    if (!item->requires_grad()) continue;
    Parameter& parameter = parameters_.emplace_back();
    parameter.name = item.key();
    parameter.tensor = *item;
    parameter.storage = storage_of(*item);
    parameter.has_accumulated = before != known.end() && before->has_accumulated;
    parameter.is_sparse = sparse.contains(item->unsafeGetTensorImpl());
  }
  for (std::size_t i = parameters_.size(); i-- > 0;) {  // roughly the order of gradients
    order_.push_back(static_cast<std::int64_t>(i));
  }
  add_hooks();
}

void GradientBuckets::allocate() {
  buckets_.clear();
  std::map<at::ScalarType, std::size_t> open;  // the bucket being filled, by type
  std::vector<std::size_t> n_bytes;            // of each bucket, by index
  for (const std::int64_t next : order_) {
    const auto i = static_cast<std::size_t>(next);
    Parameter& parameter = parameters_[i];
    const at::ScalarType type = parameter.tensor.scalar_type();
    auto bucket = open.find(type);
    if (bucket == open.end()) {
      bucket = open.emplace(type, buckets_.size()).first;
      buckets_.emplace_back().type = type;
      n_bytes.push_back(0);
    }
    parameter.bucket = bucket->second;
    buckets_[parameter.bucket].parameters.push_back(i);
    n_bytes[parameter.bucket] += n_bytes_of(parameter.tensor, parameter.is_sparse);
    const double limit_mb =
        parameter.bucket == 0 ? options_.first_bucket_cap_mb : options_.bucket_cap_mb;
    if (static_cast<double>(n_bytes[parameter.bucket]) >= limit_mb * 1024 * 1024) {
      open.erase(bucket);
    }
  }

  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    // Complex numbers are averaged as pairs of real ones.
    const at::ScalarType part = c10::toRealValueType(bucket.type);
    const std::size_t element_size = c10::elementSize(part);
    const std::size_t n_flags = 2 * bucket.parameters.size();
    bucket.memory = site_.group.allocate(n_bytes[b] + n_flags * element_size, site_.where);
    std::size_t offset = 0;
    for (const std::size_t i : bucket.parameters) {
      Parameter& parameter = parameters_[i];
      if (parameter.is_sparse) {
        parameter.slice = at::empty({}, bucket.type).expand(parameter.tensor.sizes());
        continue;
      }
      const at::Tensor like = at::empty_like(parameter.tensor);  // its strides, if they are dense
      parameter.slice = slice_of(bucket.memory, offset, like.sizes(), like.strides(), bucket.type);
      offset += n_bytes_of(parameter.tensor, parameter.is_sparse);
    }
    bucket.flag_values =
        slice_of(bucket.memory, offset, {static_cast<std::int64_t>(n_flags)}, {1}, part);
    bucket.flags = elements_of(bucket.flag_values, site_.where);
    bucket.gradients = {bucket.memory.data(), offset / element_size, bucket.flags.dtype};
  }
}

void GradientBuckets::add_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    parameter.hook = parameter.accumulator->add_post_hook(
        std::make_unique<GradientHook>(*this, callbacks_.on_gradient, i));
    parameter_hooks_.push_back(
        {parameter.tensor, parameter.tensor.register_hook([this, i](const at::Tensor& /*g*/) {
           check_attached(parameters_[i]);
         })});
  }
  for (const auto& item : module_.named_parameters()) {
    at::Tensor tensor = *item;
    if (tensor.requires_grad() || !tensor.is_floating_point()) continue;
    tensor.requires_grad_(true);  // hooks need requires_grad
    parameter_hooks_.push_back(
        {tensor, tensor.register_hook([this, name = item.key()](const at::Tensor& /*g*/) {
           if (callbacks_.is_averaged()) throw_parameter_changed(name);
         })});
    tensor.requires_grad_(false);
  }
}

void GradientBuckets::remove_hooks() {
  for (Parameter& parameter : parameters_) {
    // If a peer was lost during a rebuild, some have none yet.
    if (const auto accumulator = std::exchange(parameter.accumulator, nullptr)) {
      accumulator->del_post_hook(parameter.hook);
    }
  }
  for (const ParameterHook& hook : parameter_hooks_) hook.tensor.remove_hook(hook.position);
  parameter_hooks_.clear();
}

void GradientBuckets::reorder(std::vector<std::int64_t> ready_order) {
  is_reordered_ = true;
  for (const std::int64_t i : order_) {  // those without a gradient come last
    if (!parameters_[static_cast<std::size_t>(i)].ready) ready_order.push_back(i);
  }
  lockstep::broadcast(std::span(ready_order), /*src=*/0, site_.group, {}, site_.where);
  if (ready_order == order_) return;
  order_ = std::move(ready_order);
  allocate();
}

/// The gradient becomes a slice of its bucket and stays there: the next backward accumulates into
/// it in place, unless the user has dropped it. One that this backward did not touch (an earlier
/// step's, perhaps zeroed in place, or one set by hand) is only copied into the bucket: it must
/// stay as it is if no rank has a gradient.
void GradientBuckets::copy_to_bucket(Parameter& parameter) {
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  parameter.has_gradient = gradient.defined() && parameter.has_accumulated;
  if (gradient.defined()) check_gradient(parameter);
  if (parameter.is_sparse) return;
  // Module::zero_grad of libtorch 1.13 leaves another tensor over the same memory.
  const bool is_in_bucket = gradient.defined() && has_values_in_memory(gradient) &&
                            gradient.data_ptr() == parameter.slice.data_ptr() &&
                            gradient.strides() == parameter.slice.strides();
  if (gradient.defined() && !parameter.has_accumulated) {
    if (is_in_bucket) {
      gradient = gradient.clone();
    } else {
      replace_kept_slice(parameter);
      parameter.slice.copy_(gradient);
    }
    return;
  }
  if (gradient.is_same(parameter.slice)) return;
  if (!gradient.defined()) {
    replace_kept_slice(parameter);
    parameter.slice.zero_();
    return;
  }
  if (!is_in_bucket) {
    replace_kept_slice(parameter);
    parameter.slice.copy_(gradient);
  }
  if (gradient.is_cpu()) gradient = parameter.slice;
}

void GradientBuckets::check_gradient(const Parameter& parameter) const {
  const at::Tensor& gradient = parameter.tensor.grad();
  if ((gradient.layout() != at::kStrided) != parameter.is_sparse) {
    throw UsageError(
        site_.context(),
        fmt::format("the gradient of {} is {}: the weights of torch::nn::Embedding and "
                    "EmbeddingBag with sparse(true) must have sparse gradients, all "
                    "other parameters dense ones",
                    parameter.name, parameter.is_sparse ? "dense" : "sparse"));
  }
  if (gradient.requires_grad()) {
    throw UsageError(site_.context(),
                     fmt::format("the gradient of {} has a graph of its own (create_graph), which "
                                 "averaging would lose: take the gradients for a penalty on them "
                                 "from torch::autograd::grad, and call backward of the whole loss "
                                 "without create_graph",
                                 parameter.name));
  }
  if (gradient.scalar_type() != parameter.slice.scalar_type() ||
      gradient.sizes() != parameter.slice.sizes()) {
    throw_parameter_changed(parameter.name);
  }
}

/// The program may have kept the last step's gradient, which is the slice, or a view of it: its
/// storage gets a copy of the values, and the slice a storage of its own over the same memory.
void GradientBuckets::replace_kept_slice(Parameter& parameter) {
  const at::Tensor kept = parameter.slice;
  const bool is_kept = kept.use_count() > 2 || kept.storage().use_count() > 1;  // 2: ours
  if (!is_kept || kept.numel() == 0) return;
  const SharedBuffer& memory = buckets_[parameter.bucket].memory;
  const auto offset = static_cast<const std::byte*>(kept.data_ptr()) - memory.data();
  parameter.slice = slice_of(memory, static_cast<std::size_t>(offset), kept.sizes(), kept.strides(),
                             kept.scalar_type());
  kept.storage().set_data_ptr(kept.clone().storage().set_data_ptr(at::DataPtr()));
}

/// On the CPU the slice is the gradient; on another device it is copied.
void GradientBuckets::publish_gradient(Parameter& parameter) {
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  if (parameter.tensor.is_cpu()) {
    gradient = parameter.slice;
  } else if (gradient.defined()) {
    gradient.copy_(parameter.slice);
  } else {
    gradient = parameter.slice.to(parameter.tensor.device());
  }
}

}  // namespace lockstep::nn::detail
