#pragma once

#include <lockstep/engine.hpp>

#include "base/fd.hpp"
#include "engines/shared/bootstrap/job.hpp"

/// Between a rank of `lockstep run` and its launcher: a socket that the rank inherits. A rank that
/// has left its world requests the next one; the launcher replies at once, with the same segment to
/// all ranks that request the same world.
///
/// One request and one reply at a time, each a single message, which arrives entirely or not at
/// all. Only the rank's own process sends requests: programs that it starts do not inherit the
/// socket, and a fork of it finds the rank already taken in the segment.
namespace lockstep::shared {

/// Two ends; both are closed on exec. Throws SystemError.
struct LauncherSocket {
  base::UniqueFd launcher;
  base::UniqueFd rank;
};
LauncherSocket make_launcher_socket();

// --- the rank's side

/// The descriptor of the next world's segment. Throws TimeoutError, SystemError, PeerLost (the
/// launcher is gone), with the context of `barrier`; its timeout is the limit.
base::UniqueFd request_next_world(int socket, int rank, const Call& barrier);

// --- the launcher's side

enum class LauncherRequest : std::uint8_t { none, next_world, closed };

/// Does not wait. closed: the rank and its forks have closed their end.
LauncherRequest receive_request(int socket) noexcept;
/// Both drop the reply if the rank is gone.
void answer(int socket, const Job& next) noexcept;
void refuse(int socket, int error_number, std::string_view text) noexcept;

}  // namespace lockstep::shared
