#include "nn/reducer.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <lockstep/dist.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/tensor_ops.hpp>
#include <map>

#include "nn/error.hpp"

namespace lockstep::nn {
namespace detail {
namespace {

constexpr const char* kOperation = "DistributedDataParallel";
constexpr std::size_t kAlignment = 64;  // of a gradient in its bucket, in bytes

class GradientHook : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(Reducer& reducer, std::size_t index) : reducer_(reducer), index_(index) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    reducer_.on_gradient(index_);
    return outputs;
  }

 private:
  Reducer& reducer_;  // removes its hooks before it goes
  std::size_t index_;
};

/// One line per parameter and buffer: what all ranks must agree on.
std::vector<std::string> describe(const torch::nn::Module& module) {
  std::vector<std::string> lines;
  for (const auto& item : module.named_parameters()) {
    lines.push_back(fmt::format("parameter {} {} {}{}", item.key(),
                                c10::toString(item->scalar_type()), c10::str(item->sizes()),
                                item->requires_grad() ? "" : " frozen"));
  }
  for (const auto& item : module.named_buffers()) {
    lines.push_back(fmt::format("buffer {} {} {}", item.key(), c10::toString(item->scalar_type()),
                                c10::str(item->sizes())));
  }
  return lines;
}

std::vector<std::string> split_lines(std::span<const std::uint8_t> text) {
  std::vector<std::string> lines(1);
  for (const std::uint8_t byte : text) {
    if (byte == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += static_cast<char>(byte);
    }
  }
  return lines;
}

/// Throws the same MismatchError on every rank, naming the first difference from rank 0.
void check_same_module(const torch::nn::Module& module, const Group& group,
                       std::source_location where) {
  const std::string mine = fmt::format("{}", fmt::join(describe(module), "\n"));
  const std::vector<std::uint8_t> text(mine.begin(), mine.end());
  const auto texts = all_gather(text, group, Deadline(), where);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    auto expected = split_lines(texts[0]);
    auto got = split_lines(texts[rank]);
    const std::size_t n_lines = std::max(expected.size(), got.size());
    expected.resize(n_lines, "nothing more");
    got.resize(n_lines, "nothing more");
    const auto first = std::mismatch(expected.begin(), expected.end(), got.begin());
    throw MismatchError(context_of(kOperation, group, where),
                        fmt::format("the ranks' modules differ, first here: rank 0 has {}, rank {} "
                                    "has {}: build the same module on every rank",
                                    *first.first, rank, *first.second));
  }
}

std::size_t round_up(std::size_t n_bytes) {
  return (n_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// A tensor over part of a bucket that is no view: optimizers detach gradients in place.
at::Tensor slice_of(const SharedBuffer& memory, std::size_t offset_bytes, at::IntArrayRef sizes,
                    at::IntArrayRef strides, at::ScalarType type) {
  return at::from_blob(
      memory.data() + offset_bytes, sizes, strides, [memory](void*) {}, at::TensorOptions(type));
}

}  // namespace

Reducer::Reducer(torch::nn::Module& module, const DistributedDataParallelOptions& options,
                 std::source_location where) {
  for (const auto& item : module.named_parameters()) {
    if (!item->requires_grad()) continue;
    elements_of(item->detach().reshape({-1}), where);  // throws where it cannot be reduced
    Parameter& parameter = parameters_.emplace_back();
    parameter.name = item.key();
    parameter.tensor = *item;
  }
  check_same_module(module, options.group, where);
  for (const auto& tensors : {module.parameters(), module.buffers()}) {
    for (at::Tensor tensor : tensors) {
      broadcast(tensor, /*src=*/0, options.group, Deadline(), where);
    }
  }
  group_ = options.group.duplicate(where);
  add_buckets(options, where);
  add_hooks();
}

Reducer::~Reducer() {
  for (const Parameter& parameter : parameters_) {
    parameter.accumulator->del_post_hook(parameter.hook);
  }
}

void Reducer::add_buckets(const DistributedDataParallelOptions& options,
                          std::source_location where) {
  std::map<at::ScalarType, std::size_t> open;           // the bucket being filled, by type
  std::vector<std::size_t> n_bytes;                     // of each bucket, by index
  for (std::size_t i = parameters_.size(); i-- > 0;) {  // about the order gradients come in
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
    n_bytes[parameter.bucket] += round_up(parameter.tensor.nbytes());
    const double limit_mb =
        parameter.bucket == 0 ? options.first_bucket_size_mb : options.bucket_size_mb;
    if (static_cast<double>(n_bytes[parameter.bucket]) >= limit_mb * 1024 * 1024) {
      open.erase(bucket);
    }
  }

  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    const std::size_t n_flag_bytes = bucket.parameters.size() * c10::elementSize(bucket.type);
    bucket.memory = group_.allocate(n_bytes[b] + n_flag_bytes, where);
    std::size_t offset = 0;
    for (const std::size_t i : bucket.parameters) {
      Parameter& parameter = parameters_[i];
      const at::Tensor like = at::empty_like(parameter.tensor);  // its strides, if they are dense
      parameter.slice = slice_of(bucket.memory, offset, like.sizes(), like.strides(), bucket.type);
      offset += round_up(parameter.tensor.nbytes());
    }
    for (const std::size_t i : bucket.parameters) {
      parameters_[i].flag = slice_of(bucket.memory, offset, {}, {}, bucket.type);
      offset += c10::elementSize(bucket.type);
    }
    bucket.elements = {bucket.memory.data(), offset / c10::elementSize(bucket.type),
                       dtype_of(parameters_[bucket.parameters[0]].slice, where)};
  }
}

void Reducer::add_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    parameter.hook = parameter.accumulator->add_post_hook(std::make_unique<GradientHook>(*this, i));
  }
}

void Reducer::before_forward() {
  if (in_step_) {
    throw UsageError(
        context_of(kOperation, group_, std::source_location::current()),
        fmt::format("the last backward left by an exception, {} of {} buckets sent: the ranks may "
                    "be out of step. Build a new DistributedDataParallel, over a new group where "
                    "the exception says that this one is dead",
                    n_sent_, buckets_.size()));
  }
  if (at::GradMode::is_enabled()) sync_ = n_no_sync == 0;
}

void Reducer::on_gradient(std::size_t index) {
  if (!sync_) return;
  const at::NoGradGuard no_grad;
  if (!in_step_) start_step();
  Parameter& parameter = parameters_[index];
  if (parameter.ready) {
    throw UsageError(context_of(kOperation, group_, std::source_location::current()),
                     fmt::format("parameter {} got two gradients in one backward: checkpointing "
                                 "inside the module is not supported",
                                 parameter.name));
  }
  move_gradient(parameter);
  parameter.ready = true;
  --buckets_[parameter.bucket].n_pending;
  send_complete_buckets();
}

void Reducer::start_step() {
  in_step_ = true;
  n_sent_ = 0;
  for (Parameter& parameter : parameters_) parameter.ready = false;
  for (Bucket& bucket : buckets_) bucket.n_pending = bucket.parameters.size();
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->finish(); });
}

/// The gradient becomes a slice of its bucket, where it stays: the next backward accumulates there
/// in place, unless the user has dropped it.
void Reducer::move_gradient(Parameter& parameter) {
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  if (!gradient.defined()) {
    parameter.slice.zero_();
    parameter.flag.zero_();
    return;
  }
  if (gradient.layout() != at::kStrided) {
    throw UsageError(context_of(kOperation, group_, std::source_location::current()),
                     fmt::format("the gradient of {} is sparse: only dense gradients are "
                                 "supported, make it dense (sparse=false)",
                                 parameter.name));
  }
  if (!gradient.is_same(parameter.slice)) {
    parameter.slice.copy_(gradient);
    gradient = parameter.slice;
  }
  parameter.flag.fill_(1);
}

void Reducer::send_complete_buckets() {
  for (; n_sent_ < buckets_.size() && buckets_[n_sent_].n_pending == 0; ++n_sent_) {
    buckets_[n_sent_].work = group_.all_reduce_async(buckets_[n_sent_].elements, ReduceOp::mean);
  }
}

void Reducer::finish() {
  const at::NoGradGuard no_grad;
  for (Parameter& parameter : parameters_) {
    if (!parameter.ready) move_gradient(parameter);
  }
  for (Bucket& bucket : buckets_) bucket.n_pending = 0;
  send_complete_buckets();
  for (Bucket& bucket : buckets_) bucket.work.wait();
  for (Parameter& parameter : parameters_) {
    if (parameter.flag.item<double>() > 0) parameter.tensor.mutable_grad() = parameter.slice;
  }
  in_step_ = false;
}

std::shared_ptr<Reducer> make_reducer(torch::nn::Module& module,
                                      const DistributedDataParallelOptions& options,
                                      std::source_location where) {
  return std::make_shared<Reducer>(module, options, where);
}

void before_forward(Reducer& reducer) { reducer.before_forward(); }

}  // namespace detail

NoSync::NoSync(std::shared_ptr<detail::Reducer> reducer) : reducer_(std::move(reducer)) {
  ++reducer_->n_no_sync;
}
NoSync::~NoSync() { --reducer_->n_no_sync; }

}  // namespace lockstep::nn
