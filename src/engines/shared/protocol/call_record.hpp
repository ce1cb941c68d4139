#pragma once

#include "record/signature.hpp"

namespace lockstep::shared {

using internal::dtype_of;
using internal::encode_call;
using internal::op_of;
using internal::reduce_of;
using internal::root_of;

/// Set in a CallRecord's `what` when the call has returned.
inline constexpr std::uint64_t kFinished = 1ULL << 24U;
/// Set there when the call has a count for each rank.
inline constexpr std::uint64_t kByRank = 1ULL << 25U;
/// Set there when the call is between hosts, over another engine; its root is a rank there.
inline constexpr std::uint64_t kElsewhere = 1ULL << 26U;

}  // namespace lockstep::shared
