#pragma once

#include <lockstep/world.hpp>
#include <string>

#include "world/session.hpp"

namespace lockstep::internal {

/// This rank's world by the variables of `launcher` (not infer), with Env::read(). Throws
/// UsageError naming the variable and its value if one is missing, not a number, or contradicts
/// another.
World read_world(Launcher launcher);

/// Set by a rank, for the programs that it starts: its process, and what it is a rank of.
inline constexpr const char* kJoined = "LOCKSTEP_JOINED";
/// Throws UsageError if a rank, which is this one by the variables, has started this process.
void check_not_started_by_rank(const World& world);
/// For that, in the programs that this rank starts. `world`: as it was read.
void mark_joined(const World& world);
void unmark_joined() noexcept;

/// World::mpi of a rank that `launcher` started.
std::string find_mpi(Launcher launcher, const Env& env);
/// Whether the ranks of `lockstep run` have the module of the ucx engine.
bool has_ucx();

/// The launcher and the variables that describe a world of more than one rank; empty if the
/// environment describes none. Throws UsageError if variables contradict each other.
std::string describe_world();

}  // namespace lockstep::internal
