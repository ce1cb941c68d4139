#pragma once

#include <cstddef>
#include <lockstep/engine.hpp>
#include <lockstep/group.hpp>
#include <string>
#include <string_view>

#include "group/group_state.hpp"

/// Checks of a call's arguments. Those on the path of every call are inline, and gcc inlines them
/// only if the texts of their errors are elsewhere.
namespace lockstep::internal {

/// Why elements of this type cannot be reduced so.
std::string why_no_reduction(ReduceOp op, DType dtype);

#pragma GCC visibility push(hidden)

/// Throws UsageError, and counts the call as refused.
[[noreturn]] void reject(GroupState& group, const Call& call, const std::string& text);
[[noreturn]] void reject_reduction(GroupState& group, const Call& call);
[[noreturn]] void reject_memory(GroupState& group, const Call& call, const ConstElements& data,
                                std::string_view parameter);

inline void check_reduction(GroupState& group, const Call& call) {
  if (!can_reduce(call.reduce, call.dtype)) reject_reduction(group, call);
}

inline void check_memory(GroupState& group, const Call& call, const ConstElements& data,
                         std::string_view parameter) {
  // Far enough below SIZE_MAX that the total size over all ranks cannot overflow either.
  constexpr std::size_t kMax = std::size_t{1} << 46U;
  if (size_of(data.dtype) == 0 || data.count > kMax || (data.data == nullptr && data.count > 0)) {
    reject_memory(group, call, data, parameter);
  }
}

/// Both buffers of a call whose `in` and `out` differ.
void check_pair(GroupState& group, const Call& call, const ConstElements& in,
                const ConstElements& out);
void check_rank(GroupState& group, const Call& call, std::string_view parameter);
/// The rank of a peer, which is not this rank.
void check_peer(GroupState& group, const Call& call, std::string_view parameter);
void check_count(GroupState& group, const Call& call, std::string_view parameter, std::size_t got,
                 std::size_t expected);
/// call.counts, of which this rank's is in_count.
void check_counts(GroupState& group, const Call& call, std::size_t in_count);

#pragma GCC visibility pop
}  // namespace lockstep::internal
