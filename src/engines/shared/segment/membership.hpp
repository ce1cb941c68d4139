#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include "base/guarded_fd.hpp"
#include "base/process.hpp"
#include "base/ticks.hpp"
#include "base/wait_policy.hpp"
#include "engines/shared/segment/segment.hpp"
#include "group/failure.hpp"
#include "record/recorder.hpp"

namespace lockstep::shared {

/// The end of a rank that will never arrive.
struct Ending {
  bool failed;          ///< left with an exception (PeerFailed); false: PeerLost
  bool is_orderly;      ///< left the world, and exited with code 0 if it has exited
  std::uint32_t order;  ///< RankBlock::ended_as
  std::string text;
};

/// Of ranks that have ended, those that did so first: several, if their order is not known.
class FirstEnded {
 public:
  void add(int rank, const Ending& ending);
  bool is_empty() const noexcept { return ranks_.empty(); }
  /// Of a call that waits for them.
  internal::Failure failure() const;

 private:
  std::uint32_t order_ = 0;
  bool failed_ = false;
  std::vector<int> ranks_;
  std::string text_;
};

/// Text for a waitpid status: "was killed by signal 9 (SIGKILL)", "left the program with exit code
/// 0".
std::string describe_wait_status(int status);

/// Whether a rank's pid is valid in the PID namespace `here` (base::namespace_of); nullopt if one
/// of the two namespaces is unknown.
std::optional<bool> is_pid_of(std::uint64_t here, const RankBlock& rank) noexcept;

/// Claims the block of a rank that has not joined for this process, and writes the process's
/// identity there. Returns false if the rank has joined, or another process has claimed the block.
bool take_rank(RankBlock& block) noexcept;
/// The same; throws UsageError if another process has taken it.
void claim_rank(RankBlock& block, int rank);

/// Whether this process was the rank and has left, or failed to join.
bool has_left(const RankBlock& block) noexcept;

/// See SegmentHeader::lease_until.
bool has_lease_run_out(const SegmentHeader& header) noexcept;
/// Whether the launcher has ended this world, or the lease of this host has run out.
bool is_over(const SegmentHeader& header) noexcept;
/// Of a world that is over. With --elastic: "generation 3 of the world is over: rank 1 was killed
/// by signal 9 (SIGKILL); ..."
internal::Failure why_over(const SegmentHeader& header);

/// Gives a rank that has ended its place in the order, once. A rank that leaves, and a launcher
/// that reaps it, know that it ended after those that have a number, and take one of their own; a
/// peer that finds its process gone knows only that, so ranks found in this way may have the same
/// number. Whoever ends because it found another rank's end therefore has the higher one.
void note_ended(SegmentHeader& header, RankBlock& block, bool is_found) noexcept;

/// Marks a rank as ended: with an exception if `failure` is not empty.
void mark_ended(Segment& segment, int world_rank, std::string_view failure) noexcept;

/// This rank's membership in the world: its RankBlock, held from joining to leaving.
class Membership {
 public:
  /// Throws UsageError if another process has this rank.
  Membership(std::shared_ptr<Segment> segment, int world_rank);
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  Segment& segment() const noexcept { return *segment_; }
  const std::shared_ptr<Segment>& shared_segment() const noexcept { return segment_; }
  int world_rank() const noexcept { return world_rank_; }

  /// Marks this rank as ended; later calls have no effect.
  void leave(std::string_view failure) noexcept;

  bool is_over() const noexcept { return shared::is_over(segment_->header()); }
  /// Whether this rank has left an elastic world: its groups there are dead.
  bool has_regrouped() const noexcept { return has_regrouped_.load(std::memory_order_relaxed); }
  internal::Failure why_over() const { return shared::why_over(segment_->header()); }
  /// Enclose a sleep on a word of the segment: a launcher that ends the generation wakes it.
  /// Returns the entry for end_sleep; null if there is none left. Threads: any.
  std::atomic<std::uint64_t>* begin_sleep(std::uint64_t offset) noexcept;
  static void end_sleep(std::atomic<std::uint64_t>* entry) noexcept {
    if (entry != nullptr) entry->store(0, std::memory_order_relaxed);
  }

  /// The number under which peers find this source line. Threads: any.
  std::uint32_t site(const std::source_location& where) { return recorder_->site(where); }
  std::string_view site_name(int world_rank, std::uint32_t site) const noexcept {
    return internal::site_of(block(world_rank).flight, site);
  }
  const std::shared_ptr<internal::Recorder>& recorder() const noexcept { return recorder_; }

  /// Prepares liveness checks of all ranks, so that they work when no descriptors are left. All
  /// ranks must have joined.
  void watch_peers();
  /// Whether a rank has ended, and how; nullopt while it may still arrive, or if that is unknown.
  /// `ask_system` also queries the operating system, which takes about 10 us.
  std::optional<Ending> ending_of(int world_rank, bool ask_system) const;
  /// Whether a rank's process has ended; false if that is unknown.
  bool is_gone(int world_rank) const;
  /// Whether a signal or a debugger has stopped a rank's process.
  bool is_stopped(int world_rank) const;
  /// "is stopped (pid 12)", "has not joined the world yet", ...
  std::string liveness_text(int world_rank) const;

  /// Whether a rank is inside a call on any group.
  bool is_in_call(int world_rank) const;
  /// "outside lockstep for 3.2 s (last call: barrier #1 on group 'world' at a.cpp:40)", ... Empty
  /// if this segment has no record of one: it has made none, or a level of another engine has it.
  std::string last_call_text(int world_rank) const;
  /// A reading of both clocks from when this rank joined.
  base::TickAnchor joined() const noexcept;

  /// Whether base::fence_registered() reaches every rank of the world; all must have joined.
  bool all_receive_fences() const;
  /// By the cores that the ranks of the world, which have joined, may use together, with n_threads
  /// of them in calls at once.
  base::WaitPolicy wait_policy(int n_threads) const;

 private:
  /// `unknown` if the rank's process is not visible to this process.
  base::ProcessState state_of(int world_rank) const;
  base::WatchedProcess& watched(int world_rank) const;
  bool sees_pids_of(const RankBlock& peer) const noexcept;
  std::optional<internal::Operation> last_operation_of(int world_rank) const;

  RankBlock& block(int world_rank) const noexcept { return segment_->rank(world_rank); }

  std::shared_ptr<Segment> segment_;
  int world_rank_;
  pid_t pid_;
  bool left_ = false;
  std::atomic<bool> has_regrouped_{false};
  mutable std::atomic<bool> is_launcher_late_{false};  ///< with a rank's wait status
  mutable std::mutex mutex_;  // guards the next three: the rank's groups wait on several threads
  mutable std::vector<base::WatchedProcess> watched_;  // by world rank, after the first check
  mutable base::ReservedFd spare_;
  mutable bool keeps_pidfds_ = false;
  std::shared_ptr<internal::Recorder> recorder_;
};

}  // namespace lockstep::shared
