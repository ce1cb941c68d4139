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
#include <lockstep/trace.hpp>
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

/// Autograd has a thread for each device, and hooks of one module would run on several.
void check_one_device(const torch::nn::Module& module, const Group& group,
                      std::source_location where) {
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
    throw UsageError(context_of(kOperation, group, where),
                     fmt::format("parameter {} is on {}, {} on {}: move the module to one device",
                                 *first, device->str(), item.key(), item->device().str()));
  }
}

}  // namespace

Reducer::Reducer(torch::nn::Module& module, const DistributedDataParallelOptions& options,
                 std::source_location where)
    : module_(module), options_(options), group_(options.group) {
  take_parameters(where);
  for (at::Tensor buffer : module.buffers()) broadcast(buffer, /*src=*/0, group_, {}, where);
  group_ = options.group.duplicate(where);
  add_buckets(order_, where);
}

Reducer::~Reducer() { remove_hooks(); }

bool Reducer::has_new_parameters() const {
  auto next = parameters_.begin();  // nearly always in the same order
  for (const at::Tensor& tensor : module_.parameters()) {
    if (!tensor.requires_grad()) continue;
    const auto is_it = [&](const Parameter& p) { return p.tensor.is_same(tensor); };
    if (next == parameters_.end() || !is_it(*next)) {
      next = std::find_if(parameters_.begin(), parameters_.end(), is_it);
    }
    if (next == parameters_.end()) return true;
    ++next;
  }
  return false;
}

void Reducer::take_parameters(std::source_location where) {
  for (const at::Tensor& tensor : module_.parameters()) {
    if (tensor.requires_grad()) (void)dtype_of(tensor, where);  // can it be reduced?
  }
  check_one_device(module_, group_, where);
  check_same_module(module_, group_, where);
  remove_hooks();
  const auto known = std::move(parameters_);
  parameters_.clear();
  order_.clear();
  rebuilt_ = false;
  for (const auto& item : module_.named_parameters()) {
    const bool is_new = std::none_of(known.begin(), known.end(),
                                     [&](const Parameter& p) { return p.tensor.is_same(*item); });
    at::Tensor tensor = *item;
    if (is_new) broadcast(tensor, /*src=*/0, group_, {}, where);
    if (!item->requires_grad()) continue;
    Parameter& parameter = parameters_.emplace_back();
    parameter.name = item.key();
    parameter.tensor = *item;
  }
  for (std::size_t i = parameters_.size(); i-- > 0;) {  // about the order gradients come in
    order_.push_back(static_cast<std::int64_t>(i));
  }
  add_hooks();
}

void Reducer::add_buckets(std::span<const std::int64_t> order, std::source_location where) {
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
    n_bytes[parameter.bucket] += round_up(parameter.tensor.nbytes());
    const double limit_mb =
        parameter.bucket == 0 ? options_.first_bucket_size_mb : options_.bucket_size_mb;
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
    const DType dtype = dtype_of(parameters_[bucket.parameters[0]].slice, where);
    bucket.gradients = {bucket.memory.data(), offset / c10::elementSize(bucket.type), dtype};
    bucket.flags = {bucket.memory.data() + offset, bucket.parameters.size(), dtype};
    for (const std::size_t i : bucket.parameters) {
      parameters_[i].flag = slice_of(bucket.memory, offset, {}, {}, bucket.type);
      offset += c10::elementSize(bucket.type);
    }
  }
}

void Reducer::add_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    parameter.hook = parameter.accumulator->add_post_hook(std::make_unique<GradientHook>(*this, i));
  }
}

void Reducer::remove_hooks() {
  for (const Parameter& parameter : parameters_) {
    parameter.accumulator->del_post_hook(parameter.hook);
  }
}

/// Every rank begins with the buckets it has; here all take rank 0's order.
void Reducer::rebuild_buckets() {
  rebuilt_ = true;
  for (const std::int64_t i : order_) {  // those without a gradient come last
    if (!parameters_[static_cast<std::size_t>(i)].ready) arrivals_.push_back(i);
  }
  lockstep::broadcast(std::span(arrivals_), /*src=*/0, group_);
  if (arrivals_ == order_) return;
  order_ = arrivals_;
  add_buckets(order_, std::source_location::current());
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
  if (!at::GradMode::is_enabled()) return;
  sync_ = n_no_sync == 0;
  if (joining_) announce(sync_ ? Turn::synchronise : Turn::accumulate);
  prepare();
}

void Reducer::prepare() {
  if (!sync_) return;
  const auto where = std::source_location::current();
  if (has_new_parameters()) {
    take_parameters(where);
    add_buckets(order_, where);
  }
  if (!options_.broadcast_buffers) return;
  for (at::Tensor buffer : module_.buffers()) broadcast(buffer, /*src=*/0, group_, {}, where);
}

/// Returns what all the ranks that have data are about to do.
Reducer::Turn Reducer::announce(Turn mine) {
  std::vector<Turn> turns(static_cast<std::size_t>(group_.size()));
  const auto count = turns.size();
  group_.all_gather({&mine, 1, DType::i32}, {turns.data(), count, DType::i32});
  n_active_ = 0;
  Turn common = Turn::joined;
  for (std::size_t rank = 0; rank < count; ++rank) {
    if (turns[rank] == Turn::joined) continue;
    if (n_active_++ == 0) last_active_ = static_cast<int>(rank);
    if (common == Turn::joined) common = turns[rank];
    if (common == turns[rank]) continue;
    throw MismatchError(
        context_of(kOperation, group_, std::source_location::current()),
        fmt::format("in join, rank {} is in no_sync() and rank {} is not: let all "
                    "ranks synchronise at the same steps",
                    common == Turn::accumulate ? last_active_ : static_cast<int>(rank),
                    common == Turn::accumulate ? static_cast<int>(rank) : last_active_));
  }
  return common;
}

void Reducer::join(const std::function<void()>& body) {
  joining_ = true;
  last_active_ = -1;
  struct Leave {
    bool& joining;
    ~Leave() { joining = false; }
  } leave{joining_};
  body();
  // What this rank accumulated without a synchronisation still counts in the next one.
  if (sync_) drop_gradients();
  for (;;) {
    const Turn turn = announce(Turn::joined);
    if (turn == Turn::joined) break;
    if (!shadow) {
      throw UsageError(context_of(kOperation, group_, std::source_location::current()),
                       "join cannot follow the other ranks: no forward was made here that returns "
                       "a tensor. Give join an example of the inputs");
    }
    const at::AutoGradMode with_gradients(true);
    sync_ = turn == Turn::synchronise;
    prepare();
    shadow().sum().backward();
    if (sync_) drop_gradients();
  }
  n_active_ = group_.size();
  if (last_active_ >= 0) take_state_of(last_active_);
}

void Reducer::drop_gradients() {
  for (Parameter& parameter : parameters_) parameter.tensor.mutable_grad().reset();
}

void Reducer::take_state_of(int rank) {
  const auto where = std::source_location::current();
  for (const auto& tensors : {module_.parameters(), module_.buffers()}) {
    for (at::Tensor tensor : tensors) broadcast(tensor, rank, group_, {}, where);
  }
}

void Reducer::on_gradient(std::size_t index) {
  parameters_[index].touched = true;
  if (!sync_) return;
  const at::NoGradGuard no_grad;
  if (!in_step_) start_step();
  Parameter& parameter = parameters_[index];
  if (parameter.ready && parameter.used) {
    throw UsageError(context_of(kOperation, group_, std::source_location::current()),
                     fmt::format("parameter {} got two gradients in one backward: checkpointing "
                                 "inside the module is not supported",
                                 parameter.name));
  }
  if (!parameter.used) {
    throw UsageError(context_of(kOperation, group_, std::source_location::current()),
                     fmt::format("parameter {} got a gradient, but none in the first backward: the "
                                 "graph is not static, leave static_graph off",
                                 parameter.name));
  }
  move_gradient(parameter);
  parameter.ready = true;
  arrivals_.push_back(static_cast<std::int64_t>(index));
  --buckets_[parameter.bucket].n_pending;
  send_complete_buckets();
}

void Reducer::start_step() {
  in_step_ = true;
  n_sent_ = 0;
  arrivals_.clear();
  for (Bucket& bucket : buckets_) bucket.n_pending = bucket.parameters.size();
  for (Parameter& parameter : parameters_) {
    parameter.ready = !parameter.used;
    if (parameter.used) continue;
    move_gradient(parameter);
    --buckets_[parameter.bucket].n_pending;
  }
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
    if (gradient.is_cpu()) gradient = parameter.slice;
  }
  // One that is there may be an earlier step's, zeroed in place.
  parameter.flag.fill_(parameter.touched ? 1 : 0);
}

/// On the CPU the slice is the gradient; another device has it copied.
void Reducer::give_gradient(Parameter& parameter) {
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  if (parameter.tensor.is_cpu()) {
    gradient = parameter.slice;
  } else if (gradient.defined()) {
    gradient.copy_(parameter.slice);
  } else {
    gradient = parameter.slice.to(parameter.tensor.device());
  }
}

/// All ranks see the same shares, and throw alike.
void Reducer::check_same_gradients() {
  if (options_.find_unused_parameters) return;
  for (const Parameter& parameter : parameters_) {
    const double n_ranks = parameter.flag.item<double>() * group_.size();
    if (n_ranks < 0.5 || n_ranks > group_.size() - 0.5) continue;
    in_step_ = false;  // nothing is under way, on any rank
    throw MismatchError(
        context_of(kOperation, group_, std::source_location::current()),
        fmt::format("parameter {} got a gradient on {:.0f} of {} ranks: let it take part in every "
                    "rank's loss, or set find_unused_parameters, for which a missing one is zero",
                    parameter.name, n_ranks, group_.size()));
  }
}

void Reducer::send_complete_buckets() {
  for (; n_sent_ < buckets_.size() && buckets_[n_sent_].n_pending == 0; ++n_sent_) {
    Bucket& bucket = buckets_[n_sent_];
    if (!options_.hook) {
      Elements all = bucket.gradients;  // the flags lie behind
      all.count += bucket.flags.count;
      bucket.work = group_.all_reduce_async(all, ReduceOp::mean);
      continue;
    }
    const auto size = static_cast<std::int64_t>(bucket.gradients.count);
    bucket.complete =
        options_.hook({slice_of(bucket.memory, 0, {size}, {1}, bucket.type), n_sent_, group_});
    bucket.work = group_.all_reduce_async(bucket.flags, ReduceOp::mean);
  }
}

void Reducer::finish() {
  const TraceScope scope("DDP: the last gradients");
  const at::NoGradGuard no_grad;
  for (Parameter& parameter : parameters_) {
    if (!parameter.ready) move_gradient(parameter);
    parameter.touched = false;
  }
  for (Bucket& bucket : buckets_) bucket.n_pending = 0;
  send_complete_buckets();
  for (Bucket& bucket : buckets_) {
    if (bucket.complete) bucket.complete();
    bucket.work.wait();
    bucket.complete = nullptr;
  }
  check_same_gradients();
  const bool rescale = joining_ && options_.join_divides_by_active && n_active_ < group_.size();
  for (Parameter& parameter : parameters_) {
    if (!(parameter.flag.item<double>() > 0)) continue;
    if (rescale) parameter.slice.mul_(static_cast<double>(group_.size()) / n_active_);
    give_gradient(parameter);
  }
  if (!rebuilt_) {
    for (Parameter& parameter : parameters_)
      parameter.used = parameter.ready || !options_.static_graph;
    rebuild_buckets();
  }
  in_step_ = false;
}

std::shared_ptr<Reducer> make_reducer(torch::nn::Module& module,
                                      const DistributedDataParallelOptions& options,
                                      std::source_location where) {
  return std::make_shared<Reducer>(module, options, where);
}

void before_forward(Reducer& reducer) { reducer.before_forward(); }
void set_shadow(Reducer& reducer, std::function<at::Tensor()> shadow) {
  reducer.shadow = std::move(shadow);
}
bool wants_shadow(const Reducer& reducer) { return reducer.wants_shadow(); }
void join(Reducer& reducer, const std::function<void()>& body) { reducer.join(body); }

}  // namespace detail

namespace {

CommunicationHook compression(at::ScalarType type) {
  return [type](const GradientBucket& bucket) -> std::function<void()> {
    const at::Tensor small = bucket.gradients.to(type, /*non_blocking=*/false, /*copy=*/true);
    Work work = bucket.group.all_reduce_async(elements_of(small), ReduceOp::mean);
    return [work, small, gradients = bucket.gradients]() mutable {
      work.wait();
      gradients.copy_(small);
    };
  };
}

}  // namespace

CommunicationHook f16_compression() { return compression(at::kHalf); }
CommunicationHook bf16_compression() { return compression(at::kBFloat16); }

NoSync::NoSync(std::shared_ptr<detail::Reducer> reducer) : reducer_(std::move(reducer)) {
  ++reducer_->n_no_sync;
}
NoSync::~NoSync() { --reducer_->n_no_sync; }

}  // namespace lockstep::nn
