#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engines/shared/segment/segment.hpp"

namespace lockstep::cli {

/// A running local job of this user. It is found by the segment that its processes hold open,
/// because the segment has no name.
struct RunningJob {
  std::uint64_t job;  ///< the same in all its worlds
  pid_t launcher;
  std::string command;    ///< of the launcher
  std::string memory;     ///< path under /proc of a descriptor of the segment
  ino_t inode;            ///< of the segment: other worlds of the same launcher differ
  bool has_ranks = true;  ///< that have not left, as far as is known
};

/// All running jobs, by pid of the launcher.
std::vector<RunningJob> find_jobs();

/// The job of a process, launcher or rank. Throws UsageError if there is no such process, it
/// belongs to another user, or it is not part of a job.
RunningJob find_job(pid_t process);

/// The job's segment, read-only. Throws UsageError if the job has just ended or has another
/// version.
std::shared_ptr<const shared::Segment> open_segment(const RunningJob& job);

}  // namespace lockstep::cli
