#pragma once

#include <cstdint>
#include <lockstep/engine.hpp>
#include <string>

namespace lockstep::internal {

/// How this thread's processor computes with floating-point numbers, where that changes results:
/// the direction of rounding, and what becomes of subnormal numbers. 0: as IEEE 754 has it by
/// default.
std::uint64_t floating_point_mode() noexcept;
std::string describe_mode(std::uint64_t mode);

/// Compares floating_point_mode() between the ranks, in one small all_gather, and throws
/// MismatchError naming the ranks where it differs. Where every rank has LOCKSTEP_CHECK=full, runs
/// check_operations too. Collective.
void check_arithmetic(Engine& engine, const Call& barrier);

/// Compares what the engine's operations give, on a few elements of each type, with what a plain
/// loop gives. Throws EngineError naming operation, type and element. Collective.
void check_operations(Engine& engine, const Call& barrier);

}  // namespace lockstep::internal
