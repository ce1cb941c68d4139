#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace lockstep::shared {

class Segment;

/// The launcher's side of a job: makes the segment that the ranks inherit, and notes there how
/// each rank ended, so that its peers can say so.
class Job {
 public:
  /// Throws SystemError where the memory or the descriptor cannot be had, UsageError where
  /// n_ranks is not in 1..512.
  explicit Job(int n_ranks);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  /// The descriptor the ranks inherit (close-on-exec is set here: clear it in the child).
  int fd() const noexcept;
  /// Value of LOCKSTEP_SEGMENT for the ranks.
  std::string environment() const;
  /// Notes how a rank ended (a status as waitpid gives it).
  void rank_ended(int rank, int wait_status) noexcept;
  /// Writes DIR/rank-N.json with what each ended rank did last, unless it has done so itself.
  /// Throws SystemError.
  void write_records(const std::string& dir) const;

 private:
  std::shared_ptr<Segment> segment_;
};

}  // namespace lockstep::shared
