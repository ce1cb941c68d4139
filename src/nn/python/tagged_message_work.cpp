#include "nn/python/tagged_message_work.hpp"

#include <lockstep/error.hpp>
#include <utility>

#include "nn/python/caller.hpp"
#include "nn/python/tensors.hpp"

namespace lockstep::python {

TaggedMessageWork::TaggedMessageWork(Group group, std::shared_ptr<shared::TaggedMessages> messages,
                                     Message message)
    : Work(group.rank(), message.type, message.title, std::vector<at::Tensor>{message.tensor}),
      group_(std::move(group)),
      messages_(std::move(messages)),
      message_(std::move(message)) {}

void TaggedMessageWork::post(const Call& call, int tag) try {
  timeout_ = call.timeout;
  // The storage: a program may give the tensor another one meanwhile.
  request_ = messages_->post(call, tag, message_.in_place.storage());
} catch (...) {
  finish(std::current_exception());
  throw;
}

bool TaggedMessageWork::wait(std::chrono::milliseconds timeout) {
  if (!request_->poll()) {
    const CallOfPython ended_by_interrupts(group_);
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
    if (opType_ != c10d::OpType::SEND) write_back(message_.in_place, message_.tensor);
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

}  // namespace lockstep::python
