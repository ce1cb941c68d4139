#pragma once

#include <lockstep/engine.hpp>
#include <lockstep/group.hpp>

/// What lockstep's own engines do beyond the contract of a backend.
namespace lockstep::internal {

class NativeEngine : public Engine {
 public:
  /// Whether a small message takes about a microsecond, so that several messages are better than
  /// one that delays all data: all ranks on one host, one core per rank. The same on all ranks.
  virtual bool has_low_latency() const noexcept { return false; }
  /// Whether statistics are better reduced (detail::kMoments) than gathered from every rank,
  /// because bytes between hosts cost more than a merge. The same on all ranks.
  virtual bool reduces_moments() const noexcept { return false; }
  /// Whether run() reports to Call::progress, each time before it waits. The call is then recorded
  /// while the peers' answer is in transit, and a short call needs a single clock read; otherwise
  /// it is recorded, and timed, before and after run().
  virtual bool reports_progress() const noexcept { return false; }
};

/// False of an engine that is not lockstep's own.
bool reports_progress(const Engine& engine) noexcept;

/// See NativeEngine.
struct NativeGroup {
  static bool has_low_latency(const Group& group) noexcept;
  static bool reduces_moments(const Group& group) noexcept;
};

}  // namespace lockstep::internal
