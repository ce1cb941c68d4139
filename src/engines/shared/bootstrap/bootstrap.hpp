#pragma once

#include <functional>
#include <lockstep/engine.hpp>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "engines/shared/segment/membership.hpp"

namespace lockstep::shared {

/// For n_ranks processes of one host and one user that inherited no segment: rank 0 creates one and
/// sends its descriptor to the others over a Unix socket, whose abstract name is derived from the
/// user and `job` (see internal::World::job) and exists only during the bootstrap. Returns this
/// rank's membership when all ranks have connected; peers detect a later death as in any segment.
///
/// Each side checks the peer's user with the system, which excludes other users. When a rank dies
/// during the bootstrap, or has another world size than rank 0, all connected ranks are notified.
/// Throws TimeoutError naming the ranks that did not connect within barrier.timeout, PeerLost,
/// MismatchError, PeerFailed, UsageError (too many ranks for a host), EngineError (another user has
/// the name, or a rank is in a container in which its peers are not visible), SystemError (on all
/// connected ranks, if rank 0 has too few descriptors for them). `tune`: Env::tune. `while_waiting`
/// is called again and again until all have connected, and may throw to end it.
std::shared_ptr<Membership> bootstrap(
    std::string_view job, int rank, int n_ranks, const Call& barrier,
    const std::optional<std::string>& tune = {},
    const std::function<void()>& while_waiting = [] {});

/// The abstract name of this user's bootstrap socket for `job`, without the leading zero byte.
std::string bootstrap_socket_name(std::string_view job);

}  // namespace lockstep::shared
