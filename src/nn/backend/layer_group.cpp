#include "nn/backend/layer_group.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <lockstep/detail/collective.hpp>
#include <lockstep/error.hpp>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "group/list_calls.hpp"
#include "group/native_engine.hpp"
#include "nn/backend/backend.hpp"
#include "nn/backend/interpreter.hpp"
#include "nn/c10d/c10d_error.hpp"

namespace lockstep::backend {
namespace {

using c10d::ProcessGroup;
using WeakProcessGroup = c10::weak_intrusive_ptr<ProcessGroup>;

/// Whether its backends take tensors on CUDA only, as NCCL does.
bool needs_cuda(const ProcessGroup& process_group) {
  const auto devices = process_group.getDeviceTypes();
  const auto has = [&](c10::DeviceType type) {
    return std::ranges::any_of(devices, [&](const at::Device& d) { return d.type() == type; });
  };
  return has(at::kCUDA) && !has(at::kCPU);
}

class LayerEngine : public internal::NativeEngine {
 public:
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  std::string_view name() const noexcept override { return name_; }
  std::unique_ptr<Engine> split(const Call& call, int /*color*/, int /*key*/) override {
    reject(call);
  }
  std::unique_ptr<SharedMemory> allocate(const Call& call) override { reject(call); }
  void leave(std::string_view /*failure*/) noexcept override {}

 protected:
  LayerEngine(std::string name, int rank, int size)
      : name_(std::move(name)), rank_(rank), size_(size) {}
  [[noreturn]] void reject(const Call& call) const {
    throw UsageError(context_of(call, rank_),
                     fmt::format("a group for batch normalisation has no {}", name_of(call.op)));
  }

  const std::string name_;
  const int rank_, size_;
};

class OverGroup final : public LayerEngine {
 public:
  explicit OverGroup(const Group& group)
      : LayerEngine(std::string(group.backend()), group.rank(), group.size()), group_(group) {}

  bool has_low_latency() const noexcept override {
    return internal::NativeGroup::has_low_latency(group_);
  }
  bool reduces_moments() const noexcept override {
    return internal::NativeGroup::reduces_moments(group_);
  }
  void refuse(const Refusal& refusal) noexcept override {
    detail::Collective(refusal.operation, group_, refusal.where).refuse(refusal.reason);
  }
  void abandon(std::string_view reason) noexcept override { group_.abandon(reason); }
  void run(const Call& call) override {
    const InterruptibleCall interruptible(group_);
    const Elements out{.data = call.out, .count = call.count, .dtype = call.dtype};
    if (call.op == Op::all_reduce) {
      return internal::ListCalls::all_reduce(group_, out, call.reduce, /*tag=*/call.root, Timeout(),
                                             call.where);
    }
    if (call.op != Op::all_gather || !call.counts.empty()) reject(call);
    internal::ListCalls::all_gather(group_,
                                    {.data = call.in, .count = call.count, .dtype = call.dtype},
                                    {.data = call.out,
                                     .count = call.count * static_cast<std::size_t>(size_),
                                     .dtype = call.dtype},
                                    /*tag=*/call.root, Timeout(), call.where);
  }

 private:
  const Group group_;
};

class OverProcessGroup final : public LayerEngine {
 public:
  explicit OverProcessGroup(const c10::intrusive_ptr<ProcessGroup>& process_group)
      : LayerEngine(process_group->getBackendName(), process_group->getRank(),
                    process_group->getSize()),
        process_group_(process_group),
        needs_cuda_(needs_cuda(*process_group)) {}

  /// Over lockstep's own backend; c10d has no way to tell the peers of another.
  void refuse(const Refusal& refusal) noexcept override {
    try {
      const auto process_group = process_group_.lock();
      if (!process_group) return;
      const auto backend = process_group->getBackend(c10::DeviceType::CPU);
      if (auto* const own = dynamic_cast<Backend*>(backend.get())) {
        own->refuse(std::string(refusal.operation), refusal.where, std::string(refusal.reason));
      }
    } catch (const std::exception&) {  // it has no backend for the CPU
    }
  }
  void abandon(std::string_view /*reason*/) noexcept override {}  // c10d cannot tell the peers
  void run(const Call& call) override {
    const auto process_group = process_group_.lock();
    if (!process_group) {
      throw EngineError(context_of(call, rank_), "the process group has been destroyed");
    }
    try {
      exchange(*process_group, call);
    } catch (const Error&) {
      throw;  // of lockstep's own backend
    } catch (const std::exception& error) {
      fail(call, error);
    }
  }

 private:
  /// Sets asyncOp = false in versions of c10d that have it.
  template <class Options>
  static Options inline_options() {
    Options options;
    if constexpr (requires { options.asyncOp = false; }) options.asyncOp = false;
    return options;
  }

  void exchange(ProcessGroup& process_group, const Call& call) const {
    const auto count = static_cast<std::int64_t>(call.count);
    const bool is_sum = call.op == Op::all_reduce && call.reduce == ReduceOp::sum;
    const bool is_gather = call.op == Op::all_gather && call.counts.empty();
    if (call.dtype != DType::f64 || !(is_sum || is_gather)) reject(call);
    const at::Tensor callers = is_sum ? at::from_blob(call.out, {count}, at::kDouble)
                                      : at::from_blob(call.out, {size_, count}, at::kDouble);
    const at::Tensor out = needs_cuda_ ? at::empty_like(callers, cuda()) : callers;
    c10::intrusive_ptr<c10d::Work> work;
    if (is_sum) {
      if (needs_cuda_) out.copy_(callers);
      std::vector<at::Tensor> data{out};
      work = process_group.allreduce(data, inline_options<c10d::AllreduceOptions>());
    } else {
      at::Tensor in = at::from_blob(const_cast<void*>(call.in), {count}, at::kDouble);
      if (needs_cuda_) in = in.to(cuda());
      std::vector<std::vector<at::Tensor>> outs{out.unbind()};
      std::vector<at::Tensor> ins{in};
      work = process_group.allgather(outs, ins, inline_options<c10d::AllgatherOptions>());
    }
    if (work) work->wait();
    if (needs_cuda_) callers.copy_(out);
  }

  /// The current one of this thread, as c10d expects of every tensor of a group.
  static at::Device cuda() { return c10::impl::VirtualGuardImpl(at::kCUDA).getDevice(); }

  [[noreturn]] void fail(const Call& call, const std::exception& error) const {
    const nn::detail::C10dError said = nn::detail::c10d_error(error);
    nn::detail::throw_error(said.kind, lockstep::context_of(call, rank_),
                            fmt::format("{} of torch.distributed failed: {}", name_, said.text));
  }

  const WeakProcessGroup process_group_;
  const bool needs_cuda_;
};

}  // namespace

Group layer_group(const Group& group) {
  return {std::make_unique<OverGroup>(group), group.name(), group.timeout(), group.check()};
}

Group layer_group(const c10::intrusive_ptr<ProcessGroup>& process_group) {
  struct Known {
    WeakProcessGroup process_group;
    Group group;
  };
  static std::mutex mutex;
  static auto& known = *new std::unordered_map<const ProcessGroup*, Known>;
  const std::lock_guard lock(mutex);
  const auto found = known.find(process_group.get());
  // Another process group may have the address of one that is gone.
  if (found != known.end() && !found->second.process_group.expired()) return found->second.group;
  std::erase_if(known, [](const auto& item) { return item.second.process_group.expired(); });
  // As the backend names it (_backend.py).
  const std::string name = process_group->getGroupDesc() == "default_pg"
                               ? "world"
                               : "process group " + process_group->getGroupName();
  Group group(std::make_unique<OverProcessGroup>(process_group), name,
              std::chrono::hours(24));  // not used: the process group's own timeout ends its calls
  known.insert_or_assign(process_group.get(), Known{WeakProcessGroup(process_group), group});
  return group;
}

}  // namespace lockstep::backend
