#include "group/work.hpp"

#include <exception>
#include <lockstep/group.hpp>
#include <lockstep/trace.hpp>
#include <utility>

namespace lockstep {
namespace internal {

WorkHandle::WorkHandle(std::shared_ptr<GroupState> group, const Call& call, Timeout timeout)
    : group_(std::move(group)),
      n_exceptions_(std::uncaught_exceptions()),
      state_(group_->post(call, timeout)) {}

WorkHandle::~WorkHandle() {
  if (is_detached_.load(std::memory_order_relaxed) || process_.is_forked_child() || state_->done())
    return;
  if (std::uncaught_exceptions() > n_exceptions_ && !group_->is_idle()) {
    group_->abandon("it left because of an exception while an asynchronous call was pending");
  }
  state_->wait_until_done();
}

}  // namespace internal

void Work::wait() {
  if (!handle_) return;
  if (handle_->is_forked_child()) {
    throw UsageError({"Work::wait", "", -1, 0, {}},
                     "this process is a fork of the one that made the call; wait there");
  }
  const TraceScope scope("Work::wait");
  handle_->state().wait();
}

bool Work::done() const { return !handle_ || handle_->state().done(); }

void Work::detach() noexcept {
  if (handle_) handle_->detach();
}

}  // namespace lockstep
