#pragma once

#include <cstddef>
#include <lockstep/group.hpp>
#include <source_location>
#include <span>

#include "group/group_state.hpp"

/// The checked call of each operation, for its blocking, asynchronous and list form; group.cpp.
/// Each throws UsageError. `counts`: null if each rank gives as many elements. Hidden: else gcc
/// does not inline them in position-independent code.
namespace lockstep::internal {
#pragma GCC visibility push(hidden)

Call all_reduce_call(GroupState& group, const Elements& data, ReduceOp op,
                     std::source_location where);
Call reduce_call(GroupState& group, const Elements& data, int dst, ReduceOp op,
                 std::source_location where);
Call broadcast_call(GroupState& group, const Elements& data, int src, std::source_location where);
Call gather_call(GroupState& group, Op op, const ConstElements& in, const Elements& out,
                 const std::span<const std::size_t>* counts, int dst, std::source_location where);
Call scatter_call(GroupState& group, const ConstElements& in, const Elements& out, int src,
                  std::source_location where);
Call reduce_scatter_call(GroupState& group, const ConstElements& in, const Elements& out,
                         ReduceOp op, std::source_location where);
Call all_to_all_call(GroupState& group, const ConstElements& in, const Elements& out,
                     std::source_location where);
Call send_call(GroupState& group, const ConstElements& data, int dst, std::source_location where);
Call recv_call(GroupState& group, const Elements& data, int src, std::source_location where);

#pragma GCC visibility pop
}  // namespace lockstep::internal
