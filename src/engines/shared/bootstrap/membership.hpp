#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include "base/kept_fd.hpp"
#include "base/process.hpp"
#include "base/ticks.hpp"
#include "engines/shared/bootstrap/segment.hpp"
#include "record/recorder.hpp"

namespace lockstep::shared {

/// How a rank that will never come ended.
struct Ending {
  bool failed;  ///< left by an exception: PeerFailed, else PeerLost
  std::string text;
};

/// "was killed by signal 9 (SIGKILL)", "left the program with exit code 0": of a status as waitpid
/// gives it.
std::string describe_wait_status(int status);

/// Says in a rank's block that it is gone: by an exception with that text, if there is one.
void mark_ended(RankBlock& block, std::string_view failure) noexcept;

/// This rank's place in the world: its RankBlock, held from joining to leaving.
class Membership {
 public:
  /// Throws UsageError where another process has the place.
  Membership(std::shared_ptr<Segment> segment, int world_rank);
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  Segment& segment() const noexcept { return *segment_; }
  const std::shared_ptr<Segment>& shared_segment() const noexcept { return segment_; }
  int world_rank() const noexcept { return world_rank_; }

  /// Marks this rank as gone; the first call counts.
  void leave(std::string_view failure) noexcept;

  /// Number under which peers find this place of the program. Threads: any.
  std::uint32_t site(const std::source_location& where) { return recorder_->site(where); }
  std::string_view site_name(int world_rank, std::uint32_t site) const noexcept {
    return internal::site_of(block(world_rank).flight, site);
  }
  const std::shared_ptr<internal::Recorder>& recorder() const noexcept { return recorder_; }

  /// Gets ready to ask about the processes of all ranks, who have joined, when descriptors may be
  /// used up.
  void watch_peers();
  /// Whether a rank is gone, and how; nullopt while it may still come, or where that cannot be
  /// told. `ask_system` asks the operating system too, which takes some 10 us.
  std::optional<Ending> ending_of(int world_rank, bool ask_system) const;
  /// Whether a signal or a debugger keeps a rank's process from running.
  bool is_stopped(int world_rank) const;
  /// "is stopped (pid 12)", "has not joined the world yet", ...
  std::string condition_of(int world_rank) const;

  /// Whether a rank is inside a call, of any group.
  bool is_in_call(int world_rank) const;
  /// "it is in no lockstep call since 3.2 s (its last: barrier #1 on group 'world' at a.cpp:40)",
  /// ... Empty where this segment does not know.
  std::string doing_of(int world_rank) const;
  /// One moment on both clocks, from when this rank joined.
  base::TickAnchor joined() const noexcept;

  /// Whether base::fence_registered() reaches every rank of the world, all of whom have joined.
  bool all_take_fences() const;
  /// Whether the ranks of the world are more than the cores they may use together.
  bool is_oversubscribed() const;

 private:
  /// `unknown` where this process cannot see that of the rank.
  base::ProcessState state_of(int world_rank) const;
  bool is_gone(int world_rank) const;
  base::WatchedProcess& watched(int world_rank) const;
  bool sees_pids_of(const RankBlock& peer) const noexcept;
  std::optional<internal::Operation> last_operation_of(int world_rank) const;

  RankBlock& block(int world_rank) const noexcept { return segment_->rank(world_rank); }

  std::shared_ptr<Segment> segment_;
  int world_rank_;
  pid_t pid_;
  bool left_ = false;
  mutable std::mutex
      mutex_;  // guards watched_ and spare_: the rank's groups wait on several threads
  mutable std::vector<base::WatchedProcess> watched_;  // by rank of the world, once asked about
  mutable base::SpareFd spare_;
  std::shared_ptr<internal::Recorder> recorder_;
};

}  // namespace lockstep::shared
