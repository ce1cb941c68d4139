#pragma once

#include <sys/types.h>

#include "base/boot_clock.hpp"
#include "base/fd.hpp"
#include "run/child_group.hpp"

namespace lockstep::run {

/// A small process that briefly outlives a killed launcher and kills the process groups of the
/// ranks. The kernel kills only the ranks themselves when the launcher dies (PR_SET_PDEATHSIG), not
/// the processes they started.
///
/// Protocol: the guard writes its id to a socket once no signal to the launcher's process group
/// reaches it; the launcher waits for it, and starts no rank before. The guard then reads process
/// group ids from the socket, whose other end is held open only by the launcher and, until its
/// exec, by a rank. A rank writes its own id before its exec, so before it can start anything. The
/// launcher writes the negated id before it reaps the rank, so before the kernel can reuse the id.
/// At end of file the guard kills what is left on its list: nothing if the launcher exited
/// normally. It does so too when the lease of the launcher's node has run out (NodeLease), also if
/// the launcher is stopped.
class Guard {
 public:
  /// Returns when the guard guards. Throws SystemError.
  Guard();
  /// Waits for the guard process.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  /// Writes the process group id of the caller, a group leader. Async-signal-safe.
  void add_own_group() const noexcept;
  void remove_group(pid_t group) const noexcept;
  void set_lease(base::BootClock::time_point until) const noexcept;

 private:
  base::UniqueFd channel_;
  ChildGroup process_;
};

}  // namespace lockstep::run
