#pragma once

#include <chrono>
#include <functional>
#include <lockstep/engine.hpp>
#include <lockstep/group.hpp>
#include <memory>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

  /// Collective. Makes a group in which rank r of this one has counts[r] ranks, at most 512 in all,
  /// each for a thread of its own. Returns the engines of this rank, in order; they live and are
  /// lost together. Over several hosts only the first ones of a host's lowest rank send to other
  /// hosts: send and recv between hosts, and a split that is no duplicate, throw UsageError.
  virtual std::vector<std::unique_ptr<Engine>> divide(const Call& call,
                                                      std::span<const int> counts) = 0;

  /// For `at_most` from now, the other ranks do not count this rank as late, unless its process is
  /// stopped: it works elsewhere on behalf of them all. Over messages there is nothing to do: a
  /// rank whose time ends asks which ranks the others wait for.
  virtual void extend_deadline(std::chrono::nanoseconds /*at_most*/) noexcept {}
  /// Enclose a call over another engine: what the other ranks report about this one if they time
  /// out waiting for it. begin throws if this engine has already failed.
  virtual void begin_between_hosts(const Call& /*call*/) {}
  virtual void end_between_hosts() noexcept {}
};

/// False of an engine that is not lockstep's own.
bool reports_progress(const Engine& engine) noexcept;

/// What the layers above need of a Group beyond its own operations.
struct NativeGroup {
  /// Runs a call whose arguments have been checked: the memory is valid, `in` and `out` are apart
  /// where an operation wants that, the reduction supports the type, and root is a rank. Of
  /// all_reduce and all_gather root may be a tag, 0 or more: what the call is for, which ranks
  /// compare (MismatchError). Ranks may call Group's own operations meanwhile.
  static void run(const Group& group, const Call& call, Timeout timeout);
  /// The same for a call without lists; around(f) calls f, which runs it. What around throws itself
  /// ends the group, as an exception of the engine does.
  using Around = std::function<void(const std::function<void()>& f)>;
  static void run(const Group& group, const Call& call, Timeout timeout, const Around& around);
  /// The same as an asynchronous call. What the call points to must live until the Work is done.
  static Work post(const Group& group, const Call& call, Timeout timeout);
  /// See Group::split.
  struct Part {
    int color = 0, key = 0;
    std::string name;  ///< empty: it gets one
    std::chrono::milliseconds timeout;
  };
  static Group split(const Group& group, const Part& part, std::source_location where);
  /// See NativeEngine::divide. The groups of this rank's threads, one each.
  static std::vector<Group> divide(const Group& group, std::span<const int> counts,
                                   std::source_location where);
  /// See NativeEngine.
  static bool has_low_latency(const Group& group) noexcept;
  static bool reduces_moments(const Group& group) noexcept;
};

}  // namespace lockstep::internal
