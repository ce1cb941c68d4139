#pragma once

#include <functional>
#include <lockstep/engine.hpp>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "engines/shared/algorithms/host_engine.hpp"
#include "engines/shared/bootstrap/launcher_socket.hpp"
#include "engines/shared/segment/segment.hpp"
#include "group/failure.hpp"

/// The interface of the shared engine to the rest of the library.
namespace lockstep::shared {

class Membership;

/// Creates the world's channel in a new segment. `tune`: Env::tune, for all its channels.
std::shared_ptr<Segment> make_world(std::shared_ptr<Segment> segment,
                                    const std::optional<std::string>& tune = {});

/// The segment that LOCKSTEP_SEGMENT names. Throws UsageError, SystemError.
std::shared_ptr<Segment> inherit_world(std::string_view variable);
/// Whether `lockstep run --elastic` has made the world that LOCKSTEP_SEGMENT names. Throws as
/// inherit_world.
bool is_elastic(std::string_view variable);

/// The socket to the launcher that the variable names; -1: none, or this process is a fork of the
/// rank. Throws UsageError.
int launcher_socket(std::string_view variable);

/// The world that this process joins now, and as which rank.
struct CurrentWorld {
  std::shared_ptr<Segment> segment;
  NextWorld next;  ///< without a descriptor; of the inherited world: `rank`, and its size
};

/// The world that LOCKSTEP_SEGMENT names, as `rank`; or if this process has left it, or it is over,
/// or the process is a replacement: the next one, for which it asks its launcher. The variable
/// names that one then. Throws UsageError, TimeoutError, PeerLost, SystemError.
/// last_generation: see request_next_world.
CurrentWorld current_world(std::string_view variable, int rank, std::int64_t last_generation,
                           const Call& barrier);

/// Joins the world of the segment, in which this process has its rank, and waits, up to the timeout
/// of `barrier`, for all other ranks. Throws what any barrier throws, and leaves then.
std::unique_ptr<HostEngine> join_world(const std::shared_ptr<Membership>& membership,
                                       const Call& barrier);
/// The same; throws UsageError if another process has this rank.
std::unique_ptr<HostEngine> join_world(std::shared_ptr<Segment> segment, int rank,
                                       const Call& barrier);

/// Joins the world of the n_ranks processes of this host that belong to `job` and inherited no
/// segment. Throws what bootstrap() and any barrier throw. `tune`: as for make_world.
/// `while_waiting`: as for bootstrap().
std::unique_ptr<HostEngine> bootstrap_world(
    std::string_view job, int rank, int n_ranks, const Call& barrier,
    const std::optional<std::string>& tune = {},
    const std::function<void()>& while_waiting = [] {});

/// What a rank and its launcher tell each other of one generation of an elastic world; of any other
/// world, whether the launcher has ended it. Threads: any.
class Elastic {
 public:
  Elastic(std::shared_ptr<Segment> segment, int rank) : segment_(std::move(segment)), rank_(rank) {}
  /// Whether the launcher has ended the generation.
  bool is_over() const noexcept;
  /// Why it has.
  internal::Failure why_over() const;
  /// How long a rank may wait for that after a connection has broken.
  std::chrono::milliseconds time_of_verdict() const noexcept;
  /// Throws PeerLost if it has, for a wait that is not one of the world's engine.
  void check(const ErrorContext& context) const;
  /// The same, but only if this host's lease has run out: before a checkpoint is replaced.
  void check_lease(const ErrorContext& context) const;
  std::uint32_t generation() const noexcept;
  /// The same on all ranks of the job, and hardly in another one.
  std::uint32_t job() const noexcept;
  /// Whether the job has several nodes, of which one may not know yet that it is lost.
  bool has_nodes() const noexcept { return time_of_verdict().count() > 0; }
  /// Whether processes wait for the next one.
  bool has_waiting_replacements() const noexcept;
  /// Tells the launcher that this rank has completed a step; not where its host's lease has run
  /// out: the others may have gone on without it.
  void step_done() const noexcept;
  /// Whether an earlier generation has completed a step: a rank without its result lacks the state.
  bool has_earlier_steps() const noexcept;
  /// Tells the launcher that this rank has done its part, which all ranks have completed: call it
  /// after the last barrier. From then on the launcher does not wait for it when others are lost,
  /// and does not replace it; it may still join a next generation (init_dist after destroy_dist).
  void finish() const noexcept;

 private:
  std::shared_ptr<Segment> segment_;
  int rank_;
};

/// Records why a rank will never join.
void declare_failed(Segment& segment, int rank, std::string_view failure) noexcept;

}  // namespace lockstep::shared
