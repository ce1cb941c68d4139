#pragma once

#include <cstddef>
#include <lockstep/engine.hpp>
#include <lockstep/group.hpp>
#include <string>
#include <string_view>

#include "group/group_state.hpp"

/// Checks of a call's arguments, and the texts of the errors of the checks in group.cpp, which are
/// on the path of every call: gcc inlines these checks only if the texts are elsewhere.
namespace lockstep::internal {
#pragma GCC visibility push(hidden)

/// Throws UsageError.
[[noreturn]] void reject(const GroupState& group, const Call& call, const std::string& text);
[[noreturn]] void reject_reduction(const GroupState& group, const Call& call);
[[noreturn]] void reject_memory(const GroupState& group, const Call& call,
                                const ConstElements& data, std::string_view parameter);

void check_rank(const GroupState& group, const Call& call, std::string_view parameter);
/// The rank of a peer, which is not this rank.
void check_peer(const GroupState& group, const Call& call, std::string_view parameter);
void check_count(const GroupState& group, const Call& call, std::string_view parameter,
                 std::size_t got, std::size_t expected);
/// call.counts, of which this rank's is in_count.
void check_counts(const GroupState& group, const Call& call, std::size_t in_count);

#pragma GCC visibility pop
}  // namespace lockstep::internal
