#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

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
  /// Some rank belonged to a world, over whatever engine.
  bool has_joined_rank() const noexcept;
  /// The rank for which `failed_rank` waited in vain: it left the world and failed in no call,
  /// while the other ended in a call that failed. nullopt where there is none.
  std::optional<int> who_left_before(int failed_rank) const;
  /// Writes DIR/rank-N.json with what each ended rank did last, unless it has done so itself.
  /// Throws SystemError.
  void write_records(const std::string& dir) const;

 private:
  std::shared_ptr<Segment> segment_;
  const int n_ranks_;  ///< the segment's is the ranks' to overwrite
};

/// Tells the launcher, in the segment that LOCKSTEP_SEGMENT names, that a rank has joined a world
/// over an engine that does not use the segment. Does nothing where the variable names none.
void note_joined(std::string_view variable) noexcept;

}  // namespace lockstep::shared
