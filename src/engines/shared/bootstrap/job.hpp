#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/boot_clock.hpp"

namespace lockstep::shared {

class Segment;

/// The launcher's side of one world of a job: creates its segment, which the ranks inherit or get
/// (launcher_socket.hpp), and records in it how each rank ended, so that its peers can report it.
class Job {
 public:
  /// Throws SystemError if there is no memory or no descriptor, UsageError if n_ranks is not in
  /// 1..512.
  /// `tune`: Env::tune.
  explicit Job(int n_ranks, const std::optional<std::string>& tune = {}, bool is_elastic = false);
  /// The next world of the same job: ranks that have ended have ended there too.
  std::unique_ptr<Job> next() const;
  /// A later generation of an elastic world, of n_ranks ranks of this host, all of them running.
  /// has_earlier_steps: whether an earlier one has completed a step.
  std::unique_ptr<Job> next_generation(int n_ranks, std::uint32_t generation,
                                       bool has_earlier_steps) const;
  /// Of a world of several hosts: the numbers of this host's ranks there, and the number of the job
  /// in flight records, the same on all hosts.
  void set_world(int first_rank, int world_size, std::uint32_t job) noexcept;
  /// How long ranks wait for the launchers' verdict after a connection has broken.
  void set_time_of_verdict(std::chrono::milliseconds time) noexcept;
  /// Until when the ranks of this host may go on: see SegmentHeader::lease_until.
  void set_lease(base::BootClock::time_point until) noexcept;
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  /// The descriptor the ranks inherit (close-on-exec is set here: clear it in the child).
  int fd() const noexcept;
  /// Value of LOCKSTEP_SEGMENT for the ranks.
  std::string environment() const;
  /// Records how a rank ended (a waitpid status).
  void rank_ended(int rank, int wait_status) noexcept;
  /// The running process that joined a world as this rank, over any engine. nullopt: there is none,
  /// or it is not visible to this process (another PID namespace, or no /proc).
  std::optional<pid_t> process_of(int rank) const noexcept;
  int n_ranks() const noexcept { return n_ranks_; }
  std::uint32_t generation() const noexcept;
  /// Ends the generation: its ranks' waits throw PeerLost, and those that sleep are woken. Once.
  /// `rank`: of the world, that was lost; -1: unknown, or more than one.
  void end_generation(std::string_view why, int rank = -1) noexcept;
  bool is_over() const noexcept;
  /// Wakes threads that began to sleep while end_generation() looked for them.
  void wake_sleepers() noexcept;
  /// For the ranks' clock, which is this process's own when the Job is made: see
  /// base/job_clock.hpp.
  void set_clock(std::int64_t word) noexcept;
  /// How many processes wait for the next generation, as its ranks see.
  void set_waiting(int n) noexcept;
  /// Whether the ranks have completed a step.
  bool has_completed_step() const noexcept;
  /// The exception with which a rank left; empty: none.
  std::string failure_of(int rank) const;
  /// The same, or how its process ended; empty: it runs.
  std::string ending_of(int rank) const;
  /// Whether any rank joined a world, over any engine.
  bool has_joined_rank() const noexcept;
  /// Whether any rank joined one over an engine that does not use the segment.
  bool has_joined_other_engine() const noexcept;
  /// Whether the rank has joined and left, without an exception.
  bool has_left(int rank) const noexcept;
  /// Whether the rank has done its part: see Elastic::finish.
  bool has_finished(int rank) const noexcept;
  /// Whether a rank has joined and left, or failed.
  bool has_rank_left() const noexcept;
  /// The rank that `failed_rank` waited for, and that had left: it left the world without a failed
  /// call, while `failed_rank` ended with PeerLost or PeerFailed. nullopt if there is none.
  std::optional<int> rank_that_left_before(int failed_rank) const;
  /// Writes DIR/rank-N.json with the last operations of a rank, if it has ended and has not done
  /// so. Throws SystemError.
  void write_record(int rank, const std::string& dir) const;

 private:
  std::shared_ptr<Segment> segment_;
  const std::optional<std::string> tune_;
  const int n_ranks_;  ///< not read from the segment, which the ranks could overwrite
};

/// Records for the launcher, in the segment that LOCKSTEP_SEGMENT names, that this process has
/// joined a world as `local_rank` over an engine that does not use the segment. Does nothing if the
/// variable names none.
void record_joined(std::string_view variable, int local_rank) noexcept;

}  // namespace lockstep::shared
