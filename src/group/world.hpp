#pragma once

#include <lockstep/launch.hpp>
#include <optional>
#include <string>

namespace lockstep::internal {

/// Who this rank is, as its launcher says.
struct World {
  Launcher launcher = Launcher::none;
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::optional<std::string> segment;  ///< LOCKSTEP_SEGMENT
  /// What this job's ranks on this host have in common, and no other job of this user has at the
  /// same time; empty where the launcher does not say.
  std::string job;
  std::optional<std::string> record_dir{};  ///< LOCKSTEP_RECORD_DIR
};

}  // namespace lockstep::internal
