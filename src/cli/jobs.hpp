#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "engines/shared/bootstrap/segment.hpp"

namespace lockstep::cli {

/// A running local job of this user: found by the memory that its processes hold open, since it has
/// no name that anybody could guess.
struct RunningJob {
  pid_t launcher;
  std::string command;  ///< of the launcher
  std::string memory;   ///< path under /proc of a descriptor of the segment
  ino_t inode;          ///< of the segment: another world of the same launcher has another
};

/// All of them, by number of the launcher.
std::vector<RunningJob> find_jobs();

/// The job that a process, launcher or rank, belongs to. Throws UsageError where it is no process,
/// another user's, or of no job.
RunningJob find_job(pid_t process);

/// The job's segment, to read. Throws UsageError where the job has just ended or is of another
/// version.
std::shared_ptr<const shared::Segment> look_at(const RunningJob& job);

}  // namespace lockstep::cli
