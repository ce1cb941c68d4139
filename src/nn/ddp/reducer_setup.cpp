#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <chrono>
#include <lockstep/detail/collective.hpp>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/sync_batch_norm.hpp>
#include <lockstep/nn/sync_batch_norm_scope.hpp>
#include <lockstep/nn/tensor_ops.hpp>
#include <lockstep/objects.hpp>
#include <map>
#include <thread>
#include <unordered_set>
#include <utility>

#include "group/check.hpp"
#include "nn/ddp/in_sync.hpp"
#include "nn/ddp/reducer.hpp"
#include "nn/ddp/reducer_parts.hpp"
#include "nn/elements/elements.hpp"
#include "nn/tensors/tensor_call.hpp"
#include "world/session.hpp"

namespace lockstep::nn::detail {
namespace {

constexpr std::size_t kAlignment = 64;  // of a gradient in its bucket, in bytes

class GradientHook : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(Reducer& reducer, std::size_t index) : reducer_(reducer), index_(index) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    reducer_.on_gradient(index_);
    return outputs;
  }
  bool belongs_to(const Reducer& reducer) const { return &reducer == &reducer_; }

 private:
  Reducer& reducer_;  // removes its hooks before its destruction
  std::size_t index_;
};

/// The order of the elements of a gradient in its bucket, unless it is contiguous.
std::string describe_strides(const at::Tensor& parameter) {
  if (parameter.is_contiguous()) return {};
  const at::Tensor like = at::empty_like(parameter);
  return like.is_contiguous() ? "" : c10::str(" with strides ", like.strides());
}

/// The parameters whose gradients are sparse.
std::unordered_set<const void*> sparse_parameters(const torch::nn::Module& module) {
  std::unordered_set<const void*> found;
  const auto add_of = [&]<class Layer>(const torch::nn::Module& one, const Layer*) {
    const auto* const layer = dynamic_cast<const Layer*>(&one);
    if (layer != nullptr && layer->options.sparse() && layer->weight.defined()) {
      found.insert(layer->weight.unsafeGetTensorImpl());
    }
  };
  for (const auto& one : module.modules()) {
    add_of(*one, static_cast<torch::nn::EmbeddingImpl*>(nullptr));
    add_of(*one, static_cast<torch::nn::EmbeddingBagImpl*>(nullptr));
  }
  return found;
}

/// One line per parameter and buffer: what must agree on all ranks.
std::vector<std::string> describe(const torch::nn::Module& module) {
  std::vector<std::string> lines;
  const auto sparse = sparse_parameters(module);
  std::map<const void*, std::string> names;  // the first of each tensor
  for (const auto& item : module.named_parameters()) {
    const auto [first, is_first] = names.emplace(item->unsafeGetTensorImpl(), item.key());
    lines.push_back(fmt::format("parameter {} {} {}{}{}{}", item.key(),
                                c10::toString(item->scalar_type()), c10::str(item->sizes()),
                                item->requires_grad() ? describe_strides(*item) : " frozen",
                                sparse.contains(item->unsafeGetTensorImpl()) ? " sparse" : "",
                                is_first ? "" : ", the same tensor as " + first->second));
  }
  for (const auto& item : module.named_buffers()) {
    lines.push_back(fmt::format("buffer {} {} {}", item.key(), c10::toString(item->scalar_type()),
                                c10::str(item->sizes())));
  }
  return lines;
}

/// Throws the same MismatchError on every rank, naming the first difference from rank 0.
void check_same_module(const torch::nn::Module& module, const Group& group,
                       const ErrorContext& context) {
  const auto modules = all_gather_object(describe(module), group, Timeout(), context.where);
  for (std::size_t rank = 1; rank < modules.size(); ++rank) {
    if (modules[rank] == modules[0]) continue;
    auto expected = modules[0], got = modules[rank];
    const std::size_t n_lines = std::max(expected.size(), got.size());
    expected.resize(n_lines, "nothing more");
    got.resize(n_lines, "nothing more");
    const auto first = std::mismatch(expected.begin(), expected.end(), got.begin());
    throw MismatchError(context,
                        fmt::format("the ranks' modules differ, first here: rank 0 has {}, rank {} "
                                    "has {}: build the same module on every rank",
                                    *first.first, rank, *first.second));
  }
}

/// The padded size of a parameter's gradient in a bucket.
std::size_t n_bytes_of(const at::Tensor& tensor, bool is_sparse) {
  return is_sparse ? 0 : (tensor.nbytes() + kAlignment - 1) / kAlignment * kAlignment;
}

/// Autograd has one thread per device; hooks of one module would run on several threads.
void check_one_device(const torch::nn::Module& module, const ErrorContext& context) {
  const std::string* first = nullptr;
  std::optional<at::Device> device;
  const auto parameters = module.named_parameters();
  for (const auto& item : parameters) {
    if (!item->requires_grad()) continue;
    if (!device.has_value()) {
      first = &item.key();
      device = item->device();
    }
    if (item->device() == *device) continue;
    throw UsageError(context,
                     fmt::format("parameter {} is on {}, {} on {}: move the module to one device",
                                 *first, device->str(), item.key(), item->device().str()));
  }
}

/// Throws UsageError for a tensor that cannot be sent, before anything is sent.
void check_tensors(const torch::nn::Module& module, const ErrorContext& context) {
  const auto check = [&context](const char* kind, const std::string& name,
                                const at::Tensor& tensor) {
    const at::ScalarType part = c10::toRealValueType(tensor.scalar_type());
    if (tensor.requires_grad() && !dtype_of(part)) {
      throw UsageError(context, fmt::format("{} {} is of type {}, whose gradients cannot be "
                                            "averaged: convert it with to(), or freeze it",
                                            kind, name, c10::toString(tensor.scalar_type())));
    }
    if (tensor.requires_grad() && !tensor.is_leaf()) {
      throw UsageError(context, fmt::format("{} {} is the result of an operation, which gets no "
                                            "gradient of its own: pass what it was computed from",
                                            kind, name));
    }
    if ((tensor.is_cpu() || tensor.is_cuda()) && tensor.layout() == at::kStrided) return;
    throw UsageError(context, fmt::format("{} {} is a {}: make it a dense tensor on a CPU or CUDA "
                                          "device",
                                          kind, name, tensor.toString()));
  };
  for (const auto& item : module.named_parameters()) check("parameter", item.key(), *item);
  for (const auto& item : module.named_buffers()) check("buffer", item.key(), *item);
}

/// Returns an empty Storage for a sparse tensor: set_data may make a parameter sparse.
c10::Storage storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage() : c10::Storage();
}

void check_bucket_size(const char* name, double size_mb, const ErrorContext& context) {
  if (size_mb >= 0) return;  // not of a NaN
  throw UsageError(context,
                   fmt::format("{} is {}: expected MiB, as 25; infinity puts all gradients "
                               "of a type into one bucket, 0 each into its own",
                               name, size_mb));
}

/// With a group, and the options' present names.
DistributedDataParallelOptions completed(DistributedDataParallelOptions options,
                                         std::source_location where) {
  const Group given = options.group ? *options.group : default_group();
  options.group = internal::follow_world(given, context_of(kOperation, given, where));
  options.bucket_cap_mb = options.bucket_size_mb.value_or(options.bucket_cap_mb);
  options.first_bucket_cap_mb = options.first_bucket_size_mb.value_or(options.first_bucket_cap_mb);
  if (options.hook) options.comm_hook = std::move(options.hook);
  return options;
}

}  // namespace

Reducer::Reducer(torch::nn::Module& module, const DistributedDataParallelOptions& options,
                 std::source_location where)
    : module_(module),
      options_(completed(options, where)),
      checks_fully_(options_.group->check() == Check::full),
      is_alone_(!options.group && !is_distributed()),
      made_at_(where),
      where_(where),
      group_(*options_.group) {
  name_layers(module, Naming::on_all_ranks);  // for the errors of SyncBatchNorm
  const Group given = group_;
  try {
    lockstep::detail::Collective(kOperation, given, where_).run([&] {
      explain([] { return std::string("comparing the ranks' modules"); },
              [&] {
                check_bucket_size("bucket_cap_mb", options_.bucket_cap_mb, context());
                check_bucket_size("first_bucket_cap_mb", options_.first_bucket_cap_mb, context());
                register_parameters();
                for (at::Tensor buffer : module.buffers()) {
                  broadcast(buffer, /*src=*/0, group_, {}, where_);
                }
                group_ = group_.duplicate(where_);
                add_buckets(bucket_order_);
              });
    });
  } catch (...) {  // the destructor will not run
    remove_hooks();
    throw;
  }
}

Reducer::~Reducer() { remove_hooks(); }

void Reducer::check_world() const {
  internal::check_not_left(group_, context());
  if (is_alone_ && is_distributed()) {
    throw UsageError(context(),
                     "was made before this rank was in a world, whose gradients it would not "
                     "average: make it after init_dist, or give it a group");
  }
}

ErrorContext Reducer::context() const { return context_of(kOperation, group_, where_); }

std::string Reducer::names_of(const Bucket& bucket) const {
  const std::string& first = parameters_[bucket.parameters.front()].name;
  const std::string& last = parameters_[bucket.parameters.back()].name;
  const std::string names = first == last ? first : first + " to " + last;
  return fmt::format("{} (bucket {} of {})", names, &bucket - buckets_.data() + 1, buckets_.size());
}

std::string Reducer::changed_parameter() const {
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

void Reducer::throw_parameter_changed(const std::string& name) const {
  throw UsageError(
      context(),
      fmt::format("parameter {} has changed (torch::load, to(), set_data, requires_grad_) since "
                  "the last synchronised forward of DistributedDataParallel: after a change, call "
                  "its forward, not that of the wrapped module",
                  name));
}

void Reducer::check_before_step() const {
  if (phase_ != Phase::prepared) {
    const std::string name = changed_parameter();
    if (!name.empty()) throw_parameter_changed(name);
  }
  for (const Parameter& parameter : parameters_) {
    for (const auto& hook : parameter.accumulator->post_hooks()) {
      const auto* const other = dynamic_cast<const GradientHook*>(hook.get());
      if (other == nullptr || other->belongs_to(*this)) continue;
      throw UsageError(context(),
                       fmt::format("parameter {} is in another DistributedDataParallel too, and "
                                   "both would average its gradient: keep one of them",
                                   parameter.name));
    }
  }
}

/// Runs before each gradient of the parameter, whatever accumulates it.
void Reducer::check_attached(const Parameter& parameter) const {
  if (!synchronises()) return;
  const auto now = torch::autograd::impl::try_get_grad_accumulator(parameter.tensor);
  if (now == parameter.accumulator) return;
  if (!now && parameter.accumulator.use_count() > 1) return;  // a graph from before the change
  throw_parameter_changed(parameter.name);
}

std::vector<Group> Reducer::groups_of_forward() const {
  std::vector<Group> groups;
  const auto add = [&](const Group& group) {
    // In a larger group some ranks do not have this module.
    if (group.size() == 1 || group.size() > group_.size()) return;
    if (std::ranges::find(groups, group) == groups.end()) groups.push_back(group);
  };
  for (const auto& module : module_.modules()) {
    const auto* const layer = dynamic_cast<const NamedLayer*>(module.get());
    if (layer != nullptr) add(layer->present_group(where_));
  }
  if (const auto scope = SyncBatchNormScope::active()) {
    add(scope->group ? internal::follow_world(*scope->group, context()) : default_group());
  }
  return groups;
}

/// In all groups at once: the one the peers use next, if any, is unknown here.
void Reducer::barrier_before_rebuild() const {
  std::vector<Work> barriers;
  for (const Group& group : groups_of_forward())
    barriers.push_back(group.barrier_async({}, where_));
  if (barriers.empty()) return;  // the peers' next call is in this object's group
  barriers.push_back(group_.barrier_async({}, where_));
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

void Reducer::register_parameters() {
  check_one_device(module_, context());
  check_tensors(module_, context());
  check_same_module(module_, group_, context());
  remove_hooks();
  const auto known = std::move(parameters_);
  parameters_.clear();
  bucket_order_.clear();
  rebuilt_ = false;
  std::unordered_set<const void*> taken;
  const auto sparse = sparse_parameters(module_);
  for (const auto& item : module_.named_parameters()) {
    if (!taken.insert(item->unsafeGetTensorImpl()).second) continue;  // has an earlier name too
    const auto before = std::find_if(known.begin(), known.end(),
                                     [&](const Parameter& p) { return p.tensor.is_same(*item); });
    const bool is_same = before != known.end() && before->storage.unsafeGetStorageImpl() ==
                                                      storage_of(*item).unsafeGetStorageImpl();
    at::Tensor tensor = *item;
    if (!is_same) broadcast(tensor, /*src=*/0, group_, {}, where_);
    if (!item->requires_grad()) continue;
    Parameter& parameter = parameters_.emplace_back();
    parameter.name = item.key();
    parameter.tensor = *item;
    parameter.storage = storage_of(*item);
    parameter.has_accumulated = before != known.end() && before->has_accumulated;
    parameter.is_sparse = sparse.contains(item->unsafeGetTensorImpl());
  }
  for (std::size_t i = parameters_.size(); i-- > 0;) {  // roughly the order of gradients
    bucket_order_.push_back(static_cast<std::int64_t>(i));
  }
  add_hooks();
}

void Reducer::add_buckets(std::span<const std::int64_t> order) {
  buckets_.clear();
  std::map<at::ScalarType, std::size_t> open;  // the bucket being filled, by type
  std::vector<std::size_t> n_bytes;            // of each bucket, by index
  for (const std::int64_t next : order) {
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
    bucket.memory = group_.allocate(n_bytes[b] + n_flags * element_size, where_);
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
    bucket.flags = elements_of(bucket.flag_values, where_);
    bucket.gradients = {bucket.memory.data(), offset / element_size, bucket.flags.dtype};
  }
}

void Reducer::add_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    parameter.hook = parameter.accumulator->add_post_hook(std::make_unique<GradientHook>(*this, i));
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
           if (synchronises()) throw_parameter_changed(name);
         })});
    tensor.requires_grad_(false);
  }
}

void Reducer::remove_hooks() {
  for (Parameter& parameter : parameters_) {
    // If a peer was lost during a rebuild, some have none yet.
    if (const auto accumulator = std::exchange(parameter.accumulator, nullptr)) {
      accumulator->del_post_hook(parameter.hook);
    }
  }
  for (const ParameterHook& hook : parameter_hooks_) hook.tensor.remove_hook(hook.position);
  parameter_hooks_.clear();
}

/// Every rank starts with its current buckets; then all use rank 0's order.
void Reducer::rebuild_buckets() {
  rebuilt_ = true;
  for (const std::int64_t i : bucket_order_) {  // those without a gradient come last
    if (!parameters_[static_cast<std::size_t>(i)].ready) ready_order_.push_back(i);
  }
  lockstep::broadcast(std::span(ready_order_), /*src=*/0, group_, {}, where_);
  if (ready_order_ == bucket_order_) return;
  bucket_order_ = ready_order_;
  add_buckets(bucket_order_);
}

}  // namespace lockstep::nn::detail
