#include "nn/backend/backend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <lockstep/engine.hpp>
#include <mutex>
#include <optional>

#include "group/list_calls.hpp"
#include "group/no_rank_text.hpp"
#include "nn/backend/interpreter.hpp"

namespace lockstep::backend {

using c10d::OpType;
using internal::ListCalls;

namespace {

constinit Interpreter current_interpreter;

struct Registry {
  std::mutex mutex;
  std::vector<c10::weak_intrusive_ptr<Backend>> backends;
};

Registry& registry() {
  static auto& only = *new Registry;
  return only;
}

}  // namespace

const Interpreter& interpreter() noexcept { return current_interpreter; }

void set_interpreter(const Interpreter& interpreter) noexcept { current_interpreter = interpreter; }

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
  joined_.engine->leave(failure);
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

int Backend::checked_root(std::int64_t root, const ErrorContext& context) const {
  if (root < 0 || root >= size_) {
    throw UsageError(context, internal::no_rank_text("the root", root, size_));
  }
  return static_cast<int>(root);
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

Backend::WorkResult Backend::message_in_host(const Message& message, const ErrorContext& context,
                                             std::uint32_t n_refused) {
  const bool is_send = message.type == OpType::SEND;
  if (message.type != OpType::RECVANYSOURCE && (message.peer < 0 || message.peer >= size_)) {
    throw UsageError(context, internal::no_rank_text(is_send ? "dst" : "src", message.peer, size_));
  }
  const at::Tensor tensor = only(message.tensors, context);
  const at::Tensor in_place =
      is_send ? contiguous(tensor, context) : contiguous_output(tensor, context);
  const Elements elements = elements_of(in_place);
  auto work = c10::make_intrusive<TaggedMessageWork>(
      group(), joined_.messages,
      TaggedMessageWork::Message{
          .tensor = tensor, .in_place = in_place, .type = message.type, .title = message.title});
  const InterruptibleCall ended_by_interrupts(group());
  work->post({.op = is_send ? Op::send : Op::recv,
              .dtype = elements.dtype,
              .root = message.peer,
              .count = elements.count,
              .in = is_send ? elements.data : nullptr,
              .out = is_send ? nullptr : elements.data,
              .n_refused = n_refused,
              .group = group().name(),
              .timeout = Timeout(options_->timeout).or_else({}),
              .where = context.where},
             message.tag);
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
    const Op op = message.type == OpType::SEND ? Op::send : Op::recv;
    const detail::Collective guard(op, message.peer, group(), context.where);
    const auto refuse = [&] {  // of no peer: nobody counts it
      guard.refuse(detail::Collective::reason_of(std::current_exception()));
    };
    try {
      return message_in_host(message, context, guard.n_refused_of_pair());
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
  return call("lockstep:barrier", OpType::BARRIER, options.asyncOp, options.timeout, {}, {},
              [](const ErrorContext&) {
                return [](const Group& group, const Site& site) {
                  group.barrier(site.timeout, site.where);
                };
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

Backend::WorkResult Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return call("lockstep:broadcast", OpType::BROADCAST, options.asyncOp, options.timeout, tensors,
              tensors, [&](const ErrorContext& context) {
                const int root = checked_root(options.rootRank, context);
                const at::Tensor tensor = only(tensors, context);
                const at::Tensor in_place = root == rank_ ? contiguous(tensor, context)
                                                          : contiguous_output(tensor, context);
                return [=](const Group& group, const Site& site) {
                  group.broadcast(elements_of(in_place), root, site.timeout, site.where);
                  if (group.rank() != root) write_back(in_place, tensor);
                };
              });
}

Backend::WorkResult Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors.front().is_sparse()) return allreduce_sparse(tensors, options);
  return call("lockstep:all_reduce", OpType::ALLREDUCE, options.asyncOp, options.timeout, tensors,
              tensors, [&](const ErrorContext& context) {
                const at::Tensor tensor = only(tensors, context);
                const at::Tensor in_place = contiguous_output(tensor, context);
                const Reduction reduction = reduction_of(in_place, options.reduceOp, context);
                return [=](const Group& group, const Site& site) {
                  group.all_reduce(reduction.elements, reduction.op, site.timeout, site.where);
                  write_back(in_place, tensor);
                };
              });
}

Backend::WorkResult Backend::allreduce_coalesced(Tensors& tensors,
                                                 const c10d::AllreduceCoalescedOptions& options) {
  return call("lockstep:all_reduce", OpType::ALLREDUCE_COALESCED, options.asyncOp, options.timeout,
              tensors, tensors, [&](const ErrorContext& context) {
                Tensors in_place;
                std::vector<Reduction> reductions;
                for (const at::Tensor& tensor : tensors) {
                  in_place.push_back(contiguous_output(tensor, context));
                  reductions.push_back(reduction_of(in_place.back(), options.reduceOp, context));
                }
                return [=, outputs = tensors](const Group& group, const Site& site) {
                  // Here: earlier calls have written their results.
                  const Tensors apart = nn::without_shared_memory(in_place);
                  for (std::size_t i = 0; i < outputs.size(); ++i) {
                    Elements elements = reductions[i].elements;
                    elements.data = apart[i].data_ptr();
                    group.all_reduce(elements, reductions[i].op, site.timeout, site.where);
                    write_back(apart[i], outputs[i]);
                  }
                };
              });
}

Backend::WorkResult Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return call("lockstep:reduce", OpType::REDUCE, options.asyncOp, options.timeout, tensors, tensors,
              [&](const ErrorContext& context) {
                const int root = checked_root(options.rootRank, context);
                const at::Tensor tensor = only(tensors, context);
                const at::Tensor in_place = root == rank_ ? contiguous_output(tensor, context)
                                                          : contiguous(tensor, context);
                const Reduction reduction = reduction_of(in_place, options.reduceOp, context);
                return [=](const Group& group, const Site& site) {
                  group.reduce(reduction.elements, root, reduction.op, site.timeout, site.where);
                  if (group.rank() == root) write_back(in_place, tensor);
                };
              });
}

Backend::Gathered Backend::prepare_gather(const at::Tensor& input, const Tensors& outputs,
                                          const ErrorContext& context) const {
  Gathered gathered{.in = contiguous(input, context), .outs = {}};
  if (outputs.size() != n_ranks()) {
    throw UsageError(context, fmt::format("{} output tensors for {} ranks", outputs.size(), size_));
  }
  for (const at::Tensor& output : outputs) {
    gathered.outs.push_back(contiguous_output(output, context));
    if (output.scalar_type() != input.scalar_type()) {
      throw UsageError(context, fmt::format("an output is of type {}, the input of {}",
                                            at::toString(output.scalar_type()),
                                            at::toString(input.scalar_type())));
    }
  }
  check_outputs_apart(outputs, context);
  const auto own = static_cast<std::size_t>(rank_);
  if (gathered.outs[own].numel() != input.numel()) {
    throw UsageError(context, fmt::format("output {} has {} elements, this rank's input {}", own,
                                          gathered.outs[own].numel(), input.numel()));
  }
  gathered.in = apart_from(ranges_of(outputs), gathered.in);
  return gathered;
}

namespace {

void write_all_back(const Tensors& contiguous, const Tensors& tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) write_back(contiguous[i], tensors[i]);
}

}  // namespace

Backend::WorkResult Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) {
  return call("lockstep:all_gather", OpType::ALLGATHER, options.asyncOp, options.timeout, inputs,
              outputs.empty() ? Tensors{} : outputs.front(), [&](const ErrorContext& context) {
                if (outputs.size() != 1) throw UsageError(context, "takes one list of outputs");
                Gathered gathered = prepare_gather(only(inputs, context), outputs.front(), context);
                return [gathered = std::move(gathered), tensors = outputs.front()](
                           const Group& group, const Site& site) {
                  ListCalls::all_gather(group, elements_of(gathered.in),
                                        elements_of_each(gathered.outs), site.timeout, site.where);
                  write_all_back(gathered.outs, tensors);
                };
              });
}

Backend::WorkResult Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& options) {
  Tensors results;
  for (const Tensors& list : outputs) results.insert(results.end(), list.begin(), list.end());
  // outputs: for each rank its tensors, or for each input the ranks' tensors.
  return call("lockstep:all_gather", OpType::ALLGATHER_COALESCED, options.asyncOp, options.timeout,
              inputs, results, [&](const ErrorContext& context) {
                check_outputs_apart(results, context);
                const auto written = ranges_of(results);
                if (outputs.size() != n_ranks()) {
                  throw UsageError(context, fmt::format("{} lists of outputs for {} ranks",
                                                        outputs.size(), size_));
                }
                std::vector<Gathered> all;
                std::vector<Tensors> tensors;
                for (std::size_t i = 0; i < inputs.size(); ++i) {
                  Tensors of_input;
                  for (const Tensors& of_rank : outputs) {
                    if (of_rank.size() != inputs.size()) {
                      throw UsageError(context, fmt::format("{} outputs of a rank for {} inputs",
                                                            of_rank.size(), inputs.size()));
                    }
                    of_input.push_back(of_rank[i]);
                  }
                  all.push_back(prepare_gather(inputs[i], of_input, context));
                  all.back().in = apart_from(written, all.back().in);
                  tensors.push_back(std::move(of_input));
                }
                return [all = std::move(all), tensors = std::move(tensors)](const Group& group,
                                                                            const Site& site) {
                  for (std::size_t i = 0; i < all.size(); ++i) {
                    ListCalls::all_gather(group, elements_of(all[i].in),
                                          elements_of_each(all[i].outs), site.timeout, site.where);
                    write_all_back(all[i].outs, tensors[i]);
                  }
                };
              });
}

Backend::WorkResult Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::GatherOptions& options) {
  return call("lockstep:gather", OpType::GATHER, options.asyncOp, options.timeout, inputs,
              outputs.empty() ? Tensors{} : outputs.front(), [&](const ErrorContext& context) {
                const int root = checked_root(options.rootRank, context);
                const at::Tensor in = only(inputs, context);
                if (rank_ != root && !outputs.empty()) {
                  throw UsageError(context, "only the destination takes outputs");
                }
                std::optional<Gathered> gathered;
                Tensors tensors;
                if (rank_ == root) {
                  if (outputs.size() != 1) throw UsageError(context, "takes one list of outputs");
                  tensors = outputs.front();
                  gathered = prepare_gather(in, tensors, context);
                }
                return [root, in = contiguous(in, context), gathered = std::move(gathered),
                        tensors = std::move(tensors)](const Group& group, const Site& site) {
                  if (!gathered) {
                    group.gather(elements_of(in), {}, root, site.timeout, site.where);
                    return;
                  }
                  ListCalls::gather(group, elements_of(gathered->in),
                                    elements_of_each(gathered->outs), root, site.timeout,
                                    site.where);
                  write_all_back(gathered->outs, tensors);
                };
              });
}

Backend::WorkResult Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ScatterOptions& options) {
  return call(
      "lockstep:scatter", OpType::SCATTER, options.asyncOp, options.timeout,
      inputs.empty() ? outputs : inputs.front(), outputs, [&](const ErrorContext& context) {
        const int root = checked_root(options.rootRank, context);
        const at::Tensor output = only(outputs, context);
        const at::Tensor out = contiguous_output(output, context);
        Tensors parts;
        if (rank_ == root) {
          if (inputs.size() != 1 || inputs.front().size() != n_ranks()) {
            throw UsageError(context,
                             fmt::format("the source takes one list of {} tensors", size_));
          }
          for (const at::Tensor& part : inputs.front()) {
            parts.push_back(apart_from(ranges_of(outputs), contiguous(part, context)));
            if (part.numel() != output.numel() || part.scalar_type() != output.scalar_type()) {
              throw UsageError(context, "the tensors differ in size or type");
            }
          }
        } else if (!inputs.empty()) {
          throw UsageError(context, "only the source takes inputs");
        }
        return [root, output, out, parts = std::move(parts)](const Group& group, const Site& site) {
          if (parts.empty()) {
            group.scatter({}, elements_of(out), root, site.timeout, site.where);
          } else {
            ListCalls::scatter(group, elements_of_each<ConstElements>(parts), elements_of(out),
                               root, site.timeout, site.where);
          }
          write_back(out, output);
        };
      });
}

}  // namespace lockstep::backend
