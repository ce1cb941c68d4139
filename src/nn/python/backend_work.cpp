#include "nn/python/backend_work.hpp"

#include <fmt/format.h>

#include <lockstep/error.hpp>
#include <utility>

#include "nn/python/caller.hpp"
#include "nn/python/torch_error.hpp"

namespace lockstep::python {

BackendWork::BackendWork(Group group, c10d::OpType type, const char* title,
                         const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> results)
    : Work(group.rank(), type, title, inputs),
      group_(std::move(group)),
      results_(std::move(results)) {}

bool BackendWork::wait(std::chrono::milliseconds timeout) {
  if (!isCompleted()) {
    const CallOfPython call(group_);
    std::unique_lock lock(mutex_);
    const auto is_completed = [this] { return completed_; };
    if (timeout == kNoTimeout) {
      cv_.wait(lock, is_completed);
    } else if (!cv_.wait_for(lock, timeout, is_completed)) {
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

c10::intrusive_ptr<c10::ivalue::Future> BackendWork::getFuture() {
  const std::lock_guard lock(mutex_);
  if (!future_) {
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (completed_) complete_future();
  }
  return future_;
}

void BackendWork::complete_future() {
  if (exception_) {
    future_->setError(error_for_torch(exception_));  // DDP rethrows it in backward
  } else {
    future_->markCompleted(c10::IValue(results_));
  }
}

std::function<void()> BackendWork::complete(std::exception_ptr error) {
  finish(std::move(error));
  const std::lock_guard lock(mutex_);
  if (!future_ || future_->completed()) return {};  // one made from now on is complete
  return [work = WorkPtr::reclaim_copy(this)] { work->complete_future(); };
}

}  // namespace lockstep::python
