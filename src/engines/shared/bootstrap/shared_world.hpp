#pragma once

#include <lockstep/engine.hpp>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "engines/shared/algorithms/host_engine.hpp"
#include "engines/shared/segment/segment.hpp"

/// The interface of the shared engine to the rest of the library.
namespace lockstep::shared {

/// Creates the world's channel in a new segment. `tune`: Env::tune, for all its channels.
std::shared_ptr<Segment> make_world(std::shared_ptr<Segment> segment,
                                    const std::optional<std::string>& tune = {});

/// The segment that LOCKSTEP_SEGMENT names. Throws UsageError, SystemError.
std::shared_ptr<Segment> inherit_world(std::string_view variable);

/// Returns `inherited`, or if this process has left that world as `rank`, the next world, which it
/// requests from its launcher. The variable then names the next world. Throws TimeoutError,
/// PeerLost, SystemError.
std::shared_ptr<Segment> next_world(std::shared_ptr<Segment> inherited, std::string_view variable,
                                    int rank, const Call& barrier);

/// Joins the segment's world as `rank` and waits, up to the timeout of `barrier`, for all other
/// ranks. Throws UsageError, and what any barrier throws.
std::unique_ptr<HostEngine> join_world(std::shared_ptr<Segment> segment, int rank,
                                       const Call& barrier);

/// Joins the world of the n_ranks processes of this host that belong to `job` and inherited no
/// segment. Throws what bootstrap() and any barrier throw. `tune`: as for make_world.
std::unique_ptr<HostEngine> bootstrap_world(std::string_view job, int rank, int n_ranks,
                                            const Call& barrier,
                                            const std::optional<std::string>& tune = {});

/// Records why a rank will never join.
void declare_failed(Segment& segment, int rank, std::string_view failure) noexcept;

}  // namespace lockstep::shared
