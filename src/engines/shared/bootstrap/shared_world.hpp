#pragma once

#include <chrono>
#include <lockstep/engine.hpp>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "engines/shared/bootstrap/segment.hpp"
#include "record/recorder.hpp"

/// The interface of the shared engine to the rest of the library.
namespace lockstep::shared {

class TaggedMessages;

/// Creates the world's channel in a new segment. `tune`: Env::tune, for all its channels.
std::shared_ptr<Segment> make_world(std::shared_ptr<Segment> segment,
                                    const std::optional<std::string>& tune = {});

/// The segment that LOCKSTEP_SEGMENT names. Throws UsageError, SystemError.
std::shared_ptr<Segment> inherit_world(std::string_view variable);

/// `inherited`, or if this process has left the world there as `rank`: the next world, for which it
/// asks its launcher. The variable names that one then. Throws TimeoutError, PeerLost, SystemError.
std::shared_ptr<Segment> next_world(std::shared_ptr<Segment> inherited, std::string_view variable,
                                    int rank, const Call& barrier);

/// Joins the segment's world as `rank` and waits, up to the timeout of `barrier`, for all other
/// ranks. Throws UsageError, and what any barrier throws.
std::unique_ptr<Engine> join_world(std::shared_ptr<Segment> segment, int rank, const Call& barrier);

/// Joins the world of the n_ranks processes of this host that belong to `job` and inherited no
/// segment. Throws what bootstrap() and any barrier throw. `tune`: as for make_world.
std::unique_ptr<Engine> bootstrap_world(std::string_view job, int rank, int n_ranks,
                                        const Call& barrier,
                                        const std::optional<std::string>& tune = {});

/// Writes the rank's flight record, in memory that the segment's other processes can read and that
/// outlives the rank. `engine`: made by one of the two functions above.
std::shared_ptr<internal::Recorder> recorder_of(const Engine& engine) noexcept;

/// For `at_most` from now, the other ranks of `engine` (made by bootstrap_world, or a split of it)
/// do not count this rank as late, unless its process is stopped: it works elsewhere on behalf of
/// them all.
void extend_deadline(Engine& engine, std::chrono::nanoseconds at_most) noexcept;

/// Enclose a call over another engine: what the other ranks of `engine` report about this one if
/// they time out waiting for it. begin throws if `engine` has already failed.
void begin_elsewhere(Engine& engine, const Call& call);
void end_elsewhere(Engine& engine) noexcept;

/// Collective. Sends and receives with tags between the ranks of `engine`, which must outlive the
/// result; null on all ranks if one of them may not access another's memory (process_vm_readv).
std::shared_ptr<TaggedMessages> make_messages(Engine& engine, const Call& call);

/// Records why a rank will never join.
void declare_failed(Segment& segment, int rank, std::string_view failure) noexcept;

}  // namespace lockstep::shared
