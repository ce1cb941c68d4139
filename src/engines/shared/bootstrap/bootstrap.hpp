#pragma once

#include <lockstep/engine.hpp>
#include <memory>
#include <string>
#include <string_view>

#include "engines/shared/bootstrap/membership.hpp"

namespace lockstep::shared {

/// For n_ranks processes of one host and one user that inherited no segment: rank 0 makes one and
/// hands its descriptor to the others over a Unix socket, whose abstract name comes from the user
/// and `job` (see internal::World::job) and lasts as long as the meeting. Returns this rank's place
/// when all ranks have come; when one dies afterwards, its peers see it as in any segment.
///
/// Each side asks the system who is at the other end, so that no other user takes part. As soon as
/// a rank dies in the meeting, or says another size than rank 0, all that have come are told.
/// Throws TimeoutError naming the ranks that did not come within barrier.timeout, PeerLost,
/// MismatchError, PeerFailed, UsageError (more ranks than a host takes), EngineError (the name is
/// another user's, or a rank is in a container from where its peers cannot be seen), SystemError
/// (on all that have come, where rank 0 has too few descriptors for them).
std::shared_ptr<Membership> bootstrap(std::string_view job, int rank, int n_ranks,
                                      const Call& barrier);

/// The abstract name of this user's meetings for `job`, without the zero byte in front.
std::string bootstrap_socket_name(std::string_view job);

}  // namespace lockstep::shared
