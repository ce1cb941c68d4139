// The asynchronous forms of Group's operations.

#include <exception>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <memory>
#include <string>
#include <string_view>

#include "group/argument_checks.hpp"
#include "group/calls.hpp"
#include "group/work.hpp"

namespace lockstep {

using internal::GroupState;

namespace {

Work post(const std::shared_ptr<GroupState>& group, const Call& call, Timeout timeout) {
  if (const std::string_view reason = group->engine().why_one_thread(); !reason.empty()) {
    internal::reject(*group, call,
                     "asynchronous calls run on a thread of their own, but " + std::string(reason));
  }
  try {
    return Work(std::make_shared<internal::WorkHandle>(group, call, timeout));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // no memory, or no thread: the call was not made
    group->refuse(call, name_of(call.op), error.what());
    throw;
  }
}

}  // namespace

Work Group::barrier_async(Timeout timeout, Where where) const {
  return post(state_, {.op = Op::barrier, .where = where}, timeout);
}
Work Group::all_reduce_async(const Elements& data, ReduceOp op, Timeout timeout,
                             Where where) const {
  return post(state_, all_reduce_call(*state_, data, op, where), timeout);
}
Work Group::reduce_async(const Elements& data, int dst, ReduceOp op, Timeout timeout,
                         Where where) const {
  return post(state_, reduce_call(*state_, data, dst, op, where), timeout);
}
Work Group::broadcast_async(const Elements& data, int src, Timeout timeout, Where where) const {
  return post(state_, broadcast_call(*state_, data, src, where), timeout);
}
Work Group::all_gather_async(const ConstElements& in, const Elements& out, Timeout timeout,
                             Where where) const {
  return post(state_, gather_call(*state_, Op::all_gather, in, out, nullptr, /*dst=*/-1, where),
              timeout);
}
Work Group::gather_async(const ConstElements& in, const Elements& out, int dst, Timeout timeout,
                         Where where) const {
  return post(state_, gather_call(*state_, Op::gather, in, out, nullptr, dst, where), timeout);
}
Work Group::scatter_async(const ConstElements& in, const Elements& out, int src, Timeout timeout,
                          Where where) const {
  return post(state_, scatter_call(*state_, in, out, src, where), timeout);
}
Work Group::reduce_scatter_async(const ConstElements& in, const Elements& out, ReduceOp op,
                                 Timeout timeout, Where where) const {
  return post(state_, reduce_scatter_call(*state_, in, out, op, where), timeout);
}
Work Group::all_to_all_async(const ConstElements& in, const Elements& out, Timeout timeout,
                             Where where) const {
  return post(state_, all_to_all_call(*state_, in, out, where), timeout);
}
Work Group::send_async(const ConstElements& data, int dst, Timeout timeout, Where where) const {
  return post(state_, send_call(*state_, data, dst, where), timeout);
}
Work Group::recv_async(const Elements& data, int src, Timeout timeout, Where where) const {
  return post(state_, recv_call(*state_, data, src, where), timeout);
}

}  // namespace lockstep
