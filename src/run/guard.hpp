#pragma once

#include <sys/types.h>

#include "base/fd.hpp"

namespace lockstep::run {

/// A small process that outlives a killed launcher by a moment, to kill the process groups of the
/// ranks. The kernel kills the ranks themselves when the launcher dies (PR_SET_PDEATHSIG), but not
/// what they started.
///
/// Protocol: the guard reads process group numbers from a pipe that only the launcher, and a rank
/// until its exec, hold open. A rank writes its own number before its exec, so before it can start
/// anything; the launcher writes the negated number before it reaps the rank, so before the kernel
/// can give the number to somebody else. At the end of the file the guard kills what is left on
/// its list: nothing, when the launcher ended in order.
class Guard {
 public:
  /// Throws SystemError.
  Guard();
  /// Waits for the guard process.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  /// Writes the calling process's number: it leads its own group. Async-signal-safe.
  void watch_me() const noexcept;
  void forget(pid_t group) const noexcept;

 private:
  base::UniqueFd pipe_;
  pid_t pid_ = -1;
};

}  // namespace lockstep::run
