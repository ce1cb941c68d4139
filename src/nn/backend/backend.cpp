#include "nn/backend/backend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <lockstep/engine.hpp>
#include <mutex>
#include <optional>

#include "group/native_engine.hpp"
#include "group/no_rank_text.hpp"
#include "nn/interpreter.hpp"

namespace lockstep::backend {

using c10d::OpType;

namespace {

struct Registry {
  std::mutex mutex;
  std::vector<c10::weak_intrusive_ptr<Backend>> backends;
};

Registry& registry() {
  static auto& only = *new Registry;
  return only;
}

}  // namespace

void LivingBackends::add(const c10::intrusive_ptr<Backend>& backend) {
  Registry& living = registry();
  const std::lock_guard lock(living.mutex);
  living.backends.emplace_back(backend);
}

std::vector<c10::intrusive_ptr<Backend>> LivingBackends::all() {
  Registry& living = registry();
  const std::lock_guard lock(living.mutex);
  std::vector<c10::intrusive_ptr<Backend>> all;
  for (const auto& each : living.backends) {
    if (auto backend = each.lock()) all.push_back(std::move(backend));
  }
  return all;
}

void LivingBackends::leave(const std::string& failure) {
  const Released released;
  auto living = all();
  for (const auto& backend : living) backend->leave(failure);
  // After its finalization Python ends threads that take the GIL, in the middle of a destructor.
  for (const auto& backend : living) backend->end_callbacks(failure);
  living.clear();
  internal::CallQueue::wait_for_all_callbacks();
}

void LivingBackends::remove_released() noexcept {
  Registry& living = registry();
  const std::lock_guard lock(living.mutex);
  // Only weak pointers to a backend that is being released end here: no destructor runs.
  std::erase_if(living.backends, [](const auto& each) { return each.expired(); });
}

Backend::Backend(Joined joined, c10::intrusive_ptr<Options> options,
                 c10::intrusive_ptr<c10d::Backend> messages, MonitoredBarrier monitored)
    : c10d::Backend(joined.group.rank(), joined.group.size()),
      joined_(std::move(joined)),
      options_(std::move(options)),
      messages_(std::move(messages)),
      monitored_(std::move(monitored)) {
  init();
}

Backend::~Backend() {
  const Released released;
  if (process_.is_forked_child()) {  // both would wait for threads that a fork does not have
    messages_.release();
    static_cast<void>(queue_.release());
    return;
  }
  // The thread ends when its calls have.
  if (!queue_->is_idle()) group().abandon("the process group was destroyed with calls under way");
  queue_->close();
  leave({});
}

void Backend::release_resources() { LivingBackends::remove_released(); }

void Backend::leave(const std::string& failure) noexcept {
  if (process_.is_forked_child() || has_left_.exchange(true)) return;
  if (joined_.engine != nullptr) return joined_.engine->leave(failure);
  if (!failure.empty()) group().abandon(failure);
}

void Backend::end_callbacks(const std::string& failure) {
  if (process_.is_forked_child()) return;
  if (!queue_->is_idle()) {
    group().abandon(failure.empty() ? "the program ended with calls under way" : failure);
  }
  queue_->wait_for_callbacks();
}

void Backend::abort() {
  if (process_.is_forked_child()) return;
  group().abandon("the process group was aborted");
  leave("the process group was aborted");
}

void Backend::shutdown() {
  if (process_.is_forked_child()) return;
  queue_->wait_until_idle();
  is_shut_down_ = true;
  leave({});
}

ErrorContext Backend::context_of_call(const char* operation, std::source_location where) const {
  ErrorContext context = context_of(operation, where);
  if (is_shut_down_) throw UsageError(context, "the process group has been shut down");
  return context;
}

Timeout Backend::timeout_of(std::chrono::milliseconds timeout) const {
  return timeout.count() > 0 ? Timeout(timeout) : Timeout(options_->timeout);
}

void Backend::end_late(const ErrorContext& context, std::string text) const {
  text += "\n  the timeout of a call is that of init_process_group or new_group";
  group().abandon(text);
  throw TimeoutError(context, text);
}

void Backend::refuse(std::string operation, std::source_location where,
                     std::string reason) noexcept {
  if (process_.is_forked_child() || is_shut_down_) return;
  const auto tell = [this, where](const std::string& operation, const std::string& reason) {
    detail::Collective(operation, group(), where).refuse(reason);
  };
  if (queue_->is_idle()) return tell(operation, reason);
  try {
    queue_->post(
        [tell, operation = std::move(operation), reason]() -> internal::CallQueue::Completion {
          tell(operation, reason);
          return {};
        },
        {.operation = "refused call", .where = where});
  } catch (const std::exception&) {  // no memory, or no thread
    group().abandon(reason);
  }
}

void Backend::run_on_group(const char* operation, std::source_location where, const Step& step,
                           Timeout limit) const try {
  detail::Collective(operation, group(), where).run([&] { step(limit); });
} catch (const TimeoutError& error) {
  // Programs search the text for "timeout", which it lacks.
  throw TimeoutError(
      error.context(),
      error.text() + "\n  the timeout of a call is that of init_process_group or new_group");
}

Backend::WorkResult Backend::call(const Asked& asked,
                                  c10::function_ref<Step(const ErrorContext&)> prepare) {
  n_calls_.fetch_add(1, std::memory_order_relaxed);
  auto work = c10::make_intrusive<CollectiveWork>(group(), asked.type, asked.title, asked.inputs,
                                                  asked.results);
  const char* const operation = operation_of(asked.title);
  // Posting takes no time; but while Python ends, a daemon of it stops here.
  const InterruptibleCall here =
      before_call(operation, {}, [&] { return InterruptibleCall(group()); });
  const std::source_location where = here.where();
  Step step =
      before_call(operation, where, [&] { return prepare(context_of_call(operation, where)); });
  if (asked.is_async && !process_.is_forked_child()) {
    before_call(operation, where, [&] { post(asked, where, work, std::move(step)); });
  } else {
    run_here(operation, where, step, timeout_of(asked.timeout));
    work->complete(nullptr);
  }
  return work;
}

void Backend::run_here(const char* operation, std::source_location where, const Step& step,
                       Timeout limit) {
  if (process_.is_forked_child()) {
    // Throws; the queue may be that of a thread which is not here.
    return run_on_group(operation, where, step, limit);
  }
  const auto in_all = limit.or_else({});
  const auto pending = queue_->run(
      in_all, [&](std::chrono::milliseconds left) { run_on_group(operation, where, step, left); });
  if (pending) {
    const double limit_s = std::chrono::duration<double>(in_all).count();
    end_late(context_of(operation, where), pending->waited_for(rank_, limit_s));
  }
}

void Backend::post(const Asked& asked, std::source_location where,
                   const c10::intrusive_ptr<CollectiveWork>& work, Step step) {
  const char* const operation = operation_of(asked.title);
  const Timeout limit = timeout_of(asked.timeout);
  // The memory: a program may give a tensor another one (x.data = y) before the call has ended.
  auto run_posted = [this, operation, where, work, limit,
                     memory = storages_of(asked.inputs, asked.results),
                     step = std::move(step)]() -> internal::CallQueue::Completion {
    std::exception_ptr error;
    try {
      run_on_group(operation, where, step, limit);
    } catch (...) {
      error = std::current_exception();
    }
    return [work, error] { return work->complete(error); };
  };
  queue_->post(std::move(run_posted), {.operation = operation, .where = where});
}

Backend::Step Backend::step_of(nn::TensorCall call, const ErrorContext& context) const {
  const auto prepared =
      std::make_shared<nn::PreparedCall>(std::move(call), nn::kOfC10d, group(), context);
  return [this, prepared](Timeout limit) {
    prepared->run(group(), limit);
    prepared->write_back();
  };
}

Backend::Step Backend::step_of(std::vector<nn::TensorCall> calls,
                               const ErrorContext& context) const {
  const auto prepared =
      std::make_shared<nn::PreparedCalls>(std::move(calls), nn::kOfC10d, group(), context);
  return [this, prepared](Timeout limit) { prepared->run(group(), limit); };
}

void Backend::run_in_order(const Call& call) {
  const bool is_gather = call.op == Op::all_gather;
  const char* const title = is_gather ? "lockstep:all_gather" : "lockstep:all_reduce";
  n_calls_.fetch_add(1, std::memory_order_relaxed);
  CollectiveWork work(group(), is_gather ? OpType::ALLGATHER : OpType::ALLREDUCE, title, {}, {});
  static_cast<void>(context_of_call(operation_of(title), call.where));
  run_here(
      operation_of(title), call.where,
      [&](Timeout limit) { internal::NativeGroup::run(group(), call, limit); },
      timeout_of(c10d::kUnsetTimeout));
  work.complete(nullptr);
}

Backend::WorkResult Backend::message_in_host(const Message& message, const ErrorContext& context) {
  const bool is_send = message.type == OpType::SEND;
  if (message.type != OpType::RECVANYSOURCE && (message.peer < 0 || message.peer >= size_)) {
    throw UsageError(context, internal::no_rank_text(is_send ? "dst" : "src", message.peer, size_));
  }
  nn::TensorCall tensors{.op = is_send ? Op::send : Op::recv, .root = message.peer};
  (is_send ? tensors.ins : tensors.outs) = {only(message.tensors, context)};
  nn::PreparedCall prepared(std::move(tensors), nn::kOfC10d, group(), context);
  Call call = prepared.call();
  call.group = group().name();
  call.timeout = Timeout(options_->timeout).or_else({});
  auto work = c10::make_intrusive<TaggedMessageWork>(
      group(), joined_.messages,
      TaggedMessageWork::Message{.tensor = message.tensors.front(),
                                 .prepared = std::move(prepared),
                                 .type = message.type,
                                 .title = message.title});
  const InterruptibleCall ended_by_interrupts(group());
  work->post(call, message.tag);
  return work;
}

template <class F>
Backend::WorkResult Backend::message(const Message& message, F start_elsewhere) {
  const ErrorContext context = context_of_call(operation_of(message.title), interpreter().where());
  if (size_ == 1) {
    throw UsageError(context, "a group of one rank has no other to send to or to receive from");
  }
  if (process_.is_forked_child()) {
    throw UsageError(context, "this process is a fork of a rank; only the rank itself may call");
  }
  if (joined_.messages) {
    const auto refuse = [&] {
      joined_.messages->refuse({.op = message.type == OpType::SEND ? Op::send : Op::recv,
                                .root = message.peer,
                                .where = context.where},
                               detail::Collective::reason_of(std::current_exception()));
    };
    try {
      return message_in_host(message, context);
    } catch (const UsageError&) {
      refuse();
      throw;
    } catch (const Error&) {  // of the message, which has begun
      throw;
    } catch (...) {
      refuse();
      throw;
    }
  }
  return c10::make_intrusive<GlooMessageWork>(start_elsewhere(*messages_), context, message.peer,
                                              message.type, message.title, message.tensors);
}

Backend::WorkResult Backend::send(Tensors& tensors, int dst, int tag) {
  return message({"lockstep:send", OpType::SEND, tensors, dst, tag},
                 [&](c10d::Backend& gloo) { return gloo.send(tensors, dst, tag); });
}

Backend::WorkResult Backend::recv(Tensors& tensors, int src, int tag) {
  return message({"lockstep:recv", OpType::RECV, tensors, src, tag},
                 [&](c10d::Backend& gloo) { return gloo.recv(tensors, src, tag); });
}

Backend::WorkResult Backend::recvAnysource(Tensors& tensors, int tag) {
  return message({"lockstep:recvAnySource", OpType::RECVANYSOURCE, tensors,
                  shared::TaggedMessages::kAnySource, tag},
                 [&](c10d::Backend& gloo) { return gloo.recvAnysource(tensors, tag); });
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& options) {
  const auto own = std::ranges::find(ranks, rank_);
  if (own == ranks.end()) return {};
  std::vector<std::uint64_t> global_ranks;
  for (const int rank : ranks) {
    const auto r = static_cast<std::size_t>(rank);
    const auto& here = options_->global_ranks_in_group;
    global_ranks.push_back(here.empty() ? r : here.at(r));
  }
  return make({.store = store,
               .rank = static_cast<int>(own - ranks.begin()),
               .size = static_cast<int>(ranks.size()),
               .name = "process group " + options->group_name,
               .timeout = options->timeout,
               .global_ranks = std::move(global_ranks)});
}

Backend::WorkResult Backend::barrier(const c10d::BarrierOptions& options) {
  return call({"lockstep:barrier", OpType::BARRIER, options.asyncOp, options.timeout, {}, {}},
              [&](const ErrorContext& context) -> Step {
                return
                    [this, where = context.where](Timeout limit) { group().barrier(limit, where); };
              });
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const ErrorContext context = context_of_call("monitored_barrier", interpreter().where());
  if (size_ == 1) return;
  // torch's function passes its default, from PyTorch 2.14, where the program names no limit.
  const bool has_own_limit =
      options.timeout != c10d::kUnsetTimeout && options.timeout != kBackendDefaultTimeout;
  const std::chrono::milliseconds of_group = Timeout(options_->timeout).or_else({});
  monitored_.wait(context,
                  {.of_rank_0 = has_own_limit ? Timeout(options.timeout).or_else({}) : of_group,
                   .of_others = of_group,
                   .names_all_late_ranks = wait_all_ranks});
}

}  // namespace lockstep::backend
