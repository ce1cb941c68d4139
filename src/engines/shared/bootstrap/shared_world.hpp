#pragma once

#include <chrono>
#include <lockstep/engine.hpp>
#include <memory>
#include <string_view>

#include "engines/shared/bootstrap/segment.hpp"

/// What the rest of the library needs of the shared engine.
namespace lockstep::shared {

/// Gives a fresh segment the channel of its world.
std::shared_ptr<Segment> make_world(std::shared_ptr<Segment> segment);

/// The segment that LOCKSTEP_SEGMENT ("fd:nonce") names. Throws UsageError, SystemError.
std::shared_ptr<Segment> inherit_world(std::string_view variable);

/// Takes the place of `rank` in the segment's world and waits, as long as `barrier` says, for all
/// others. Throws UsageError, and what any barrier throws.
std::unique_ptr<Engine> join_world(std::shared_ptr<Segment> segment, int rank, const Call& barrier);

/// Joins the world of the n_ranks processes of this host that belong to `job` and inherited no
/// segment. Throws what bootstrap() and any barrier throw.
std::unique_ptr<Engine> bootstrap_world(std::string_view job, int rank, int n_ranks,
                                        const Call& barrier);

/// The other ranks of `engine`, one that bootstrap_world made or a split of it, do not take this
/// one for late for so long from now, unless its process is stopped: it is at work elsewhere for
/// them all.
void extend_deadline(Engine& engine, std::chrono::nanoseconds at_most) noexcept;

/// Around a call over another engine: what the other ranks of `engine` tell of this one if they
/// wait for it in vain. begin throws what has failed here.
void begin_elsewhere(Engine& engine, const Call& call);
void end_elsewhere(Engine& engine) noexcept;

/// Says for a rank that will never join why it will not.
void declare_failed(Segment& segment, int rank, std::string_view failure) noexcept;

}  // namespace lockstep::shared
