#include "nn/layer.hpp"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <exception>
#include <functional>
#include <optional>
#include <utility>

#include "base/hash.hpp"
#include "group/failure.hpp"
#include "group/native_engine.hpp"
#include "nn/error.hpp"
#include "nn/interpreter.hpp"

namespace lockstep::nn {

bool is_user_code(const std::source_location& where) {
  const std::string_view file = where.file_name();
  if (where.line() == 0 || !(file.ends_with(".h") || file.ends_with(".hpp")))
    return where.line() != 0;
  const auto is_under = [file](const char* folder) {
    return file.find(folder) != std::string_view::npos;
  };
  return !is_under("torch/nn/") && !is_under("/include/c++/") && !is_under("lockstep/nn/");
}

int tag_of(std::string_view identity) {
  return static_cast<int>(base::hash_of_bytes(identity.data(), identity.size()) & 0x7fffffffU);
}

std::string detail::Layer::name() const {
  if (title) return *title;
  return fmt::format("batch_norm #{} of a SyncBatchNormScope ({} channels)", number, n_channels);
}

ErrorContext detail::Layer::context(std::string_view pass) const {
  return context_of(fmt::format("{} of {}", pass, name()), group, where);
}

void detail::Layer::all_reduce(std::string_view pass, const Elements& message, ReduceOp op) const {
  run(pass, {.op = Op::all_reduce,
             .dtype = message.dtype,
             .reduce = op,
             .root = tag,
             .count = message.count,
             .in = message.data,
             .out = message.data,
             .where = where});
}

void detail::Layer::all_gather(std::string_view pass, const ConstElements& in,
                               const Elements& out) const {
  run(pass, {.op = Op::all_gather,
             .dtype = in.dtype,
             .root = tag,
             .count = in.count,
             .in = in.data,
             .out = out.data,
             .where = where});
}

void detail::Layer::run(std::string_view pass, const Call& call) const {
  // Ctrl-C ends it, also within backward. What a handler raises before it ends the group, for whose
  // other ranks this call has begun; the rank gets it when the group has ended.
  std::exception_ptr raised;
  try {
    communicate(pass, [&] {
      internal::NativeGroup::run(group, call, Timeout(),
                                 [&](const std::function<void()>& run_on_engine) {
                                   std::optional<InterruptibleCall> interruptible;
                                   try {
                                     interruptible.emplace(group);
                                   } catch (const std::exception& error) {
                                     raised = std::current_exception();
                                     group.abandon(error.what());
                                   }
                                   run_on_engine();
                                 });
    });
  } catch (const Error&) {
    if (!raised) throw;
  }
  if (raised) std::rethrow_exception(raised);
}

void detail::Layer::rethrow(std::string_view pass, const Error& error) const {
  ErrorContext mine = context(pass);
  const ErrorContext& its = error.context();
  if (its.operation == mine.operation) throw;  // passed through two of these
  internal::Failure failure = internal::failure_of(error);
  if (its.where.line() == where.line() &&
      std::string_view(its.where.file_name()) == where.file_name()) {
    mine.sequence = its.sequence;
    failure.text = fmt::format("{}: {}", its.operation, failure.text);
  } else {  // what() == context + text()
    const std::string_view what = error.what();
    failure.text =
        fmt::format("{}{}", what.substr(0, what.size() - error.text().size()), failure.text);
  }
  internal::throw_failure(failure, std::move(mine));
}

void refuse_create_graph(std::string_view pass, const Layer& layer, const char* text) {
  if (at::GradMode::is_enabled()) throw UsageError(layer.context(pass), text);
}

}  // namespace lockstep::nn
