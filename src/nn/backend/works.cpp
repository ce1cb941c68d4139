#include "nn/backend/works.hpp"

#include <fmt/format.h>

#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "base/wait_until_true.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "nn/error.hpp"
#include "nn/gloo_engine/c10d_error.hpp"
#include "nn/interpreter.hpp"
#include "world/session.hpp"

namespace lockstep::backend {

CollectiveWork::CollectiveWork(Group group, c10d::OpType type, const char* title,
                               const std::vector<at::Tensor>& inputs,
                               std::vector<at::Tensor> results)
    : Work(group.rank(), type, title, inputs),
      group_(std::move(group)),
      results_(std::move(results)) {}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  if (isCompleted() && !exception()) return true;
  // Also for a call that has failed: the program's end may have ended it, and then a daemon of
  // Python stops here.
  const InterruptibleCall call(group_);
  {
    std::unique_lock lock(mutex_);
    const auto is_completed = [this] { return completed_; };
    if (timeout == kNoTimeout) {
      base::wait_until_true(cv_, lock, is_completed);
    } else if (!cv_.wait_until(lock, lockstep::detail::JobClock::now() + timeout, is_completed)) {
      throw TimeoutError(
          {.operation = c10d::opTypeToString(opType_),
           .group = group_.name(),
           .rank = group_.rank(),
           .where = call.where()},
          fmt::format("timeout: the call had not completed after {} ms, the limit of "
                      "this wait; it goes on",
                      timeout.count()));
    }
  }
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  const std::lock_guard lock(mutex_);
  if (!future_) {
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (completed_) complete_future();
  }
  return future_;
}

void CollectiveWork::complete_future() {
  if (exception_) {
    future_->setError(nn::detail::error_for_torch(exception_));  // DDP rethrows it in backward
  } else {
    future_->markCompleted(c10::IValue(results_));
  }
}

std::function<void()> CollectiveWork::complete(std::exception_ptr error) {
  finish(std::move(error));
  const std::lock_guard lock(mutex_);
  if (!future_ || future_->completed()) return {};  // one made from now on is complete
  return
      [work = c10::intrusive_ptr<CollectiveWork>::reclaim_copy(this)] { work->complete_future(); };
}

TaggedMessageWork::TaggedMessageWork(Group group, std::shared_ptr<shared::TaggedMessages> messages,
                                     Message message)
    : Work(group.rank(), message.type, message.title, std::vector<at::Tensor>{message.tensor}),
      group_(std::move(group)),
      messages_(std::move(messages)),
      message_(std::move(message)) {}

void TaggedMessageWork::post(const Call& call, int tag) try {
  timeout_ = call.timeout;
  // The storage: a program may give the tensor another one meanwhile.
  request_ = messages_->post(call, tag, message_.prepared.own().storage());
} catch (...) {
  finish(std::current_exception());
  throw;
}

bool TaggedMessageWork::wait(std::chrono::milliseconds timeout) {
  if (!request_->poll()) {
    const InterruptibleCall ended_by_interrupts(group_);
    try {
      request_->wait(timeout == kNoTimeout ? timeout_ : Timeout(timeout).or_else(timeout_));
    } catch (const Error&) {  // complete() throws it
    }
  }
  complete();
  return true;
}

bool TaggedMessageWork::isCompleted() {
  if (Work::isCompleted()) return true;
  if (!request_->poll()) return false;
  try {
    complete();
  } catch (...) {  // wait() throws it
  }
  return true;
}

void TaggedMessageWork::complete() {
  const std::lock_guard lock(completing_);
  if (Work::isCompleted()) {
    if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
    return;
  }
  try {
    request_->wait(std::chrono::milliseconds::zero());
    message_.prepared.write_back();
  } catch (...) {
    finish(std::current_exception());
    throw;
  }
  finish();
}

void TaggedMessageWork::abort() {
  request_->end_with(std::make_exception_ptr(EngineError(
      {.operation = c10d::opTypeToString(opType_), .group = group_.name(), .rank = group_.rank()},
      "Work.abort was called")));
}

namespace {

/// peer: negative if it may be any.
[[noreturn]] void throw_error_of_message(const std::exception& error, const ErrorContext& context,
                                         int peer) {
  using Kind = nn::detail::C10dError::Kind;
  const nn::detail::C10dError failure = nn::detail::c10d_error(error);
  const std::string who = peer < 0 ? "another rank" : fmt::format("rank {}", peer);
  const char* const what = failure.kind == Kind::peer_lost ? "{} died or left: {}"
                           : failure.kind == Kind::timeout
                               ? "{} did not respond within the timeout: {}"
                               : "with {}: {}";
  nn::detail::throw_error(failure.kind, context,
                          fmt::format(fmt::runtime(what), who, failure.first_line()));
}

/// Gloo knows nothing of generations: aborts its work when that of an elastic world is over.
class EndsWithGeneration {
 public:
  EndsWithGeneration(const shared::Elastic* elastic, c10d::Work& work) {
    if (elastic == nullptr) return;
    thread_ = std::jthread([elastic, &work](const std::stop_token& stop) {
      constexpr std::chrono::milliseconds kInterval{5};
      std::mutex mutex;
      std::unique_lock lock(mutex);
      std::condition_variable_any stopped;
      while (!elastic->is_over()) {
        stopped.wait_for(lock, stop, kInterval, [] { return false; });
        if (stop.stop_requested()) return;
      }
      work.abort();
    });
  }

 private:
  std::jthread thread_;
};

}  // namespace

GlooMessageWork::GlooMessageWork(Inner inner, ErrorContext context, int peer, c10d::OpType type,
                                 const char* title, const std::vector<at::Tensor>& tensors)
    : Work(context.rank, type, title, tensors),
      inner_(std::move(inner)),
      context_(std::move(context)),
      peer_(peer),
      elastic_(internal::elastic()) {}

bool GlooMessageWork::wait(std::chrono::milliseconds timeout) {
  try {
    const EndsWithGeneration ends(elastic_.get(), *inner_);
    inner_->wait(timeout);
    if (elastic_) elastic_->check(context_);
  } catch (const Error&) {
    finish(std::current_exception());
    throw;
  } catch (const std::exception& error) {
    try {
      throw_error_of_message(error, context_, peer_);
    } catch (...) {
      finish(std::current_exception());
      throw;
    }
  }
  finish();
  return true;
}

}  // namespace lockstep::backend
