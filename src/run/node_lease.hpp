#pragma once

#include <algorithm>
#include <chrono>

#include "base/boot_clock.hpp"

namespace lockstep::run {

/// How long the ranks of a node other than node 0 may run without a word from it. It only computes.
///
/// The node sends heartbeats, node 0 echoes them. The lease runs from the time at which the node
/// sent the newest one that was echoed, on the node's clock (CLOCK_BOOTTIME, which goes on while a
/// machine sleeps). Node 0 counts from its echo, which is later, and adds a margin; so the node's
/// lease has run out first, also if the clocks' rates differ by the margin.
///
/// When it has run out, launcher and guard kill the node's ranks, and no rank completes a step or
/// replaces a checkpoint: until() stands in their segment, for where launcher and guard are
/// stopped. The launcher then closes its link and asks to join as a new incarnation.
class NodeLease {
 public:
  using Clock = base::BootClock;

  explicit NodeLease(std::chrono::milliseconds length) : length_(length) {}

  /// Echoes may arrive late, and in another order.
  void echoed(Clock::time_point sent) { until_ = std::max(until_, sent + length_); }
  /// Before the first echo the node may start no rank.
  Clock::time_point until() const { return until_; }
  bool has_run_out(Clock::time_point now) const { return now >= until_; }

  /// How long node 0 waits after its last echo.
  static std::chrono::milliseconds at_node_0(std::chrono::milliseconds length) {
    return length * 6 / 5;
  }

 private:
  std::chrono::milliseconds length_;
  Clock::time_point until_ = Clock::time_point::min();
};

}  // namespace lockstep::run
