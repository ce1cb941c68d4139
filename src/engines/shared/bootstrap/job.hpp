#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::shared {

class Segment;

/// The launcher's side of a job: creates the segment that the ranks inherit, and records in it how
/// each rank ended, so that its peers can report it.
class Job {
 public:
  /// Throws SystemError if there is no memory or no descriptor, UsageError if n_ranks is not in
  /// 1..512.
  /// `tune`: Env::tune.
  explicit Job(int n_ranks, const std::optional<std::string>& tune = {});
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  /// The descriptor the ranks inherit (close-on-exec is set here: clear it in the child).
  int fd() const noexcept;
  /// Value of LOCKSTEP_SEGMENT for the ranks.
  std::string environment() const;
  /// Records how a rank ended (a waitpid status).
  void rank_ended(int rank, int wait_status) noexcept;
  /// Whether any rank joined a world, over any engine.
  bool has_joined_rank() const noexcept;
  /// The rank for which `failed_rank` waited in vain: it left the world without a failed call,
  /// while `failed_rank` ended in a failed call. nullopt if there is none.
  std::optional<int> who_left_before(int failed_rank) const;
  /// Writes DIR/rank-N.json with the last operations of each ended rank that has not done so.
  /// Throws SystemError.
  void write_records(const std::string& dir) const;

 private:
  std::shared_ptr<Segment> segment_;
  const int n_ranks_;  ///< not read from the segment, which the ranks could overwrite
};

/// Records for the launcher, in the segment that LOCKSTEP_SEGMENT names, that a rank has joined a
/// world over an engine that does not use the segment. Does nothing if the variable names none.
void note_joined(std::string_view variable) noexcept;

}  // namespace lockstep::shared
