#pragma once

#include <cstdint>
#include <lockstep/engine.hpp>
#include <string>

namespace lockstep::internal {

/// This thread's floating-point mode as far as it changes results: the rounding direction and the
/// treatment of subnormal numbers. 0: the IEEE 754 default.
std::uint64_t floating_point_mode() noexcept;
std::string describe_mode(std::uint64_t mode);

/// Compares floating_point_mode() between the ranks, in one small all_gather, and throws
/// MismatchError naming the ranks if they differ. In an elastic world, ranks that were in an
/// earlier generation (was_member) go on without those that join it and differ: there the error is
/// MismatchError on the latter, and PeerFailed on all others. Collective.
void compare_settings(Engine& engine, const Call& barrier, bool was_member = false);

}  // namespace lockstep::internal
