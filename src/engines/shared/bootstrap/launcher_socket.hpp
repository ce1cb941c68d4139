#pragma once

#include <lockstep/engine.hpp>

#include "base/fd.hpp"
#include "engines/shared/bootstrap/job.hpp"

/// Between a rank of `lockstep run` and its launcher: a socket that the rank inherits. A rank that
/// has left its world asks for the next one; the launcher answers at once, with the segment that
/// all ranks which ask for the same world get.
///
/// One question and one answer at a time, each a message of its own, which arrives entirely or not
/// at all. A rank's process alone asks: what it started has not the socket, and a fork of it finds
/// the rank taken in the segment.
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
base::UniqueFd ask_for_next_world(int socket, int rank, const Call& barrier);

// --- the launcher's side

enum class Question : std::uint8_t { none, next_world, closed };

/// Without waiting. closed: the rank, and what it forked, have no end any more.
Question read_question(int socket) noexcept;
/// Both drop the answer if the rank is gone.
void answer(int socket, const Job& next) noexcept;
void refuse(int socket, int error_number, std::string_view text) noexcept;

}  // namespace lockstep::shared
