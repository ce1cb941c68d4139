#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <lockstep/detail/collective.hpp>
#include <lockstep/group.hpp>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/fork_guard.hpp"
#include "engines/shared/protocol/tagged_messages.hpp"
#include "group/call_queue.hpp"
#include "nn/backend/monitored_barrier.hpp"
#include "nn/backend/tensors.hpp"
#include "nn/backend/works.hpp"
#include "nn/error.hpp"
#include "nn/interpreter.hpp"
#include "nn/tensors/tensor_call.hpp"

namespace lockstep::backend {

using nn::interpreter;
using nn::InterruptibleCall;
using nn::Released;

/// A c10d backend for tensors of the CPU over one lockstep group. A call with asyncOp = false runs
/// on the caller's thread, one with asyncOp = true on the backend's, all in the order of the
/// program. Threads: any. Errors: lockstep::Error, from the call or from Work::wait.
class Backend final : public c10d::Backend {
 public:
  /// A process group as torch describes it, on one of its ranks.
  struct Config {
    /// The name of torch's default group, of which a process has one.
    static constexpr std::string_view kWorld = "world";

    c10::intrusive_ptr<c10d::Store> store;
    int rank;
    int size;
    std::string name;
    std::chrono::milliseconds timeout;
    /// Of the ranks, in the default group. Empty: that group itself, or ranks that need not share
    /// one and meet at the store alone.
    std::vector<std::uint64_t> global_ranks;

    bool is_world() const { return name == kWorld; }
  };
  struct Joined {
    Group group;
    Engine* engine;  // the group's; null: it is a part of lockstep's own world
    /// In a group on one host; null if ranks may not access each other's memory. Declared
    /// last: it uses the engine.
    std::shared_ptr<shared::TaggedMessages> messages;
  };
  using WorkResult = c10::intrusive_ptr<c10d::Work>;

  /// Collective. Throws PeerLost naming ranks that ended before they joined, TimeoutError naming
  /// those that did not join, EngineError.
  static c10::intrusive_ptr<Backend> make(const Config& config);
  /// Use make(). messages: what sends and receives where joined.messages is null; null in a group
  /// of one.
  Backend(Joined joined, c10::intrusive_ptr<Options> options,
          c10::intrusive_ptr<c10d::Backend> messages, MonitoredBarrier monitored);
  ~Backend() override;

  const Group& group() const { return joined_.group; }
  /// Later calls fail, and the peers' too: with `failure`, if it is not empty. May be called again.
  void leave(const std::string& failure) noexcept;
  /// A call that an exception ended before its first message counts as refused, after those that
  /// are posted: see lockstep::detail::Collective.
  void refuse(std::string operation, std::source_location where, std::string reason) noexcept;
  /// An all_gather or all_reduce of a layer, as a blocking call of the program, but for interrupts.
  void run_in_order(const Call& call);
  /// Ends calls under way, for peers with `failure` if it is not empty, and waits for the callbacks
  /// of futures.
  void end_callbacks(const std::string& failure);

  const std::string getBackendName() const override { return "lockstep"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return n_calls_.load(); }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  void abort() override;
  void shutdown() override;
  bool supportsSplitting() const override { return true; }
  /// Collective over `ranks`, in this group's numbers; null on the others.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;

  WorkResult broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkResult allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkResult allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkResult allreduce_coalesced(Tensors& tensors,
                                 const c10d::AllreduceCoalescedOptions& options) override;
  WorkResult reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkResult allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                       const c10d::AllgatherOptions& options) override;
  WorkResult _allgather_base(at::Tensor& output, at::Tensor& input,
                             const c10d::AllgatherOptions& options) override;
  WorkResult allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& options) override;
  WorkResult allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& options) override;
  WorkResult gather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::GatherOptions& options) override;
  WorkResult scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                     const c10d::ScatterOptions& options) override;
  WorkResult reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                            const c10d::ReduceScatterOptions& options) override;
  WorkResult _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                  const c10d::ReduceScatterOptions& options) override;
  WorkResult reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                             const c10d::ReduceScatterOptions& options) override;
  WorkResult alltoall_base(at::Tensor& output, at::Tensor& input,
                           std::vector<std::int64_t>& output_sizes,
                           std::vector<std::int64_t>& input_sizes,
                           const c10d::AllToAllOptions& options) override;
  WorkResult alltoall(Tensors& outputs, Tensors& inputs,
                      const c10d::AllToAllOptions& options) override;
  WorkResult send(Tensors& tensors, int dst, int tag) override;
  WorkResult recv(Tensors& tensors, int src, int tag) override;
  WorkResult recvAnysource(Tensors& tensors, int tag) override;
  WorkResult barrier(const c10d::BarrierOptions& options) override;
  /// Unlike barrier(), it leaves the group usable if a rank is late.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  /// The last owner is gone. While the list of living backends points to this one, it is not
  /// deleted: its thread would live on, also into forks of the process.
  void release_resources() override;

 private:
  ErrorContext context_of(const char* operation, std::source_location where) const {
    return nn::context_of(operation, group(), where);
  }
  /// Throws UsageError after shutdown().
  ErrorContext context_of_call(const char* operation, std::source_location where) const;
  Timeout timeout_of(std::chrono::milliseconds timeout) const;

  static const char* operation_of(const char* title) { return title + sizeof "lockstep:" - 1; }
  /// What a call does once its arguments have been checked, within `limit`.
  using Step = std::function<void(Timeout limit)>;
  void run_on_group(const char* operation, std::source_location where, const Step& step,
                    Timeout limit) const;
  /// On this thread, after the posted calls.
  void run_here(const char* operation, std::source_location where, const Step& step, Timeout limit);
  /// One send or receive.
  struct Message {
    const char* title;
    c10d::OpType type;
    const Tensors& tensors;
    int peer;  // shared::TaggedMessages::kAnySource: any
    int tag;
  };
  /// Of a call whose limit ended in or behind asynchronous ones. Ends the group.
  [[noreturn]] void end_late(const ErrorContext& context, std::string text) const;
  /// Runs f, which comes before the call's first message. If it throws, the call is refused.
  /// where: empty if f finds it.
  template <class F>
  auto before_call(const char* operation, std::source_location where, F f);
  template <class F>
  WorkResult message(const Message& message, F start_elsewhere);
  WorkResult message_in_host(const Message& message, const ErrorContext& context);
  /// A call as c10d's caller gives it.
  struct Asked {
    const char* title;
    c10d::OpType type;
    bool is_async;
    std::chrono::milliseconds timeout;
    Tensors inputs;   // for the profiler
    Tensors results;  // of the future
  };
  /// prepare: checks the arguments. Throws UsageError.
  WorkResult call(const Asked& asked, c10::function_ref<Step(const ErrorContext&)> prepare);
  void post(const Asked& asked, std::source_location where,
            const c10::intrusive_ptr<CollectiveWork>& work, Step step);
  Step step_of(nn::TensorCall call, const ErrorContext& context) const;
  /// Of several, which c10d coalesces.
  Step step_of(std::vector<nn::TensorCall> calls, const ErrorContext& context) const;
  /// Of an all_to_all between lists of tensors, whose sizes may differ.
  Step step_of_lists(const nn::TensorCall& call, const ErrorContext& context) const;
  /// Of a reduce_scatter of parts whose sizes differ: all are reduced on each rank, which keeps its
  /// own.
  Step step_of_uneven_parts(const nn::TensorCall& call, const ErrorContext& context) const;

  base::ForkGuard process_;
  Joined joined_;
  c10::intrusive_ptr<Options> options_;
  c10::intrusive_ptr<c10d::Backend> messages_;
  MonitoredBarrier monitored_;
  std::atomic<std::uint64_t> n_calls_{0};
  std::atomic<bool> has_left_{false}, is_shut_down_{false};
  // In front of the group's own, because c10d lets a program call from several threads (autograd's,
  // which posts DDP's buckets, and the one of a layer), where a Group refuses the second; and
  // because one call of c10d may be several messages, between which no other call may come. Last:
  // its thread uses the other members.
  internal::CallQueue::Owner queue_ = internal::CallQueue::make();
};

/// The backends of this process that still have an owner. Threads: any.
class LivingBackends {
 public:
  static void add(const c10::intrusive_ptr<Backend>& backend);
  /// All leave, with `failure` if it is not empty, and their callbacks end.
  static void leave(const std::string& failure);

 private:
  friend class Backend;
  static std::vector<c10::intrusive_ptr<Backend>> all();
  static void remove_released() noexcept;
};

template <class F>
auto Backend::before_call(const char* operation, std::source_location where, F f) {
  try {
    return f();
  } catch (...) {
    refuse(operation, where.line() != 0 ? where : interpreter().where(),
           detail::Collective::reason_of(std::current_exception()));
    throw;
  }
}

}  // namespace lockstep::backend
