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

Work post(const std::shared_ptr<GroupState>& group, const Call& call, Deadline deadline) {
  if (const std::string_view reason = group->engine().why_one_thread(); !reason.empty()) {
    internal::reject(*group, call,
                     "asynchronous calls run on a thread of their own, but " + std::string(reason));
  }
  try {
    return Work(std::make_shared<internal::WorkHandle>(group, call, deadline));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // no memory, or no thread: the call was not made
    group->refuse(call, name_of(call.op), error.what());
    throw;
  }
}

}  // namespace

Work Group::barrier_async(Deadline deadline, Where where) const {
  return post(state_, {.op = Op::barrier, .where = where}, deadline);
}
Work Group::all_reduce_async(const Elements& data, ReduceOp op, Deadline deadline,
                             Where where) const {
  return post(state_, all_reduce_call(*state_, data, op, where), deadline);
}
Work Group::reduce_async(const Elements& data, int dst, ReduceOp op, Deadline deadline,
                         Where where) const {
  return post(state_, reduce_call(*state_, data, dst, op, where), deadline);
}
Work Group::broadcast_async(const Elements& data, int src, Deadline deadline, Where where) const {
  return post(state_, broadcast_call(*state_, data, src, where), deadline);
}
Work Group::all_gather_async(const ConstElements& in, const Elements& out, Deadline deadline,
                             Where where) const {
  return post(state_, gather_call(*state_, Op::all_gather, in, out, nullptr, /*dst=*/-1, where),
              deadline);
}
Work Group::gather_async(const ConstElements& in, const Elements& out, int dst, Deadline deadline,
                         Where where) const {
  return post(state_, gather_call(*state_, Op::gather, in, out, nullptr, dst, where), deadline);
}
Work Group::scatter_async(const ConstElements& in, const Elements& out, int src, Deadline deadline,
                          Where where) const {
  return post(state_, scatter_call(*state_, in, out, src, where), deadline);
}
Work Group::reduce_scatter_async(const ConstElements& in, const Elements& out, ReduceOp op,
                                 Deadline deadline, Where where) const {
  return post(state_, reduce_scatter_call(*state_, in, out, op, where), deadline);
}
Work Group::all_to_all_async(const ConstElements& in, const Elements& out, Deadline deadline,
                             Where where) const {
  return post(state_, all_to_all_call(*state_, in, out, where), deadline);
}
Work Group::send_async(const ConstElements& data, int dst, Deadline deadline, Where where) const {
  return post(state_, send_call(*state_, data, dst, where), deadline);
}
Work Group::recv_async(const Elements& data, int src, Deadline deadline, Where where) const {
  return post(state_, recv_call(*state_, data, src, where), deadline);
}

}  // namespace lockstep
