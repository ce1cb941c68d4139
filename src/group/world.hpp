#pragma once

#include <lockstep/launch.hpp>
#include <optional>
#include <string>

namespace lockstep::internal {

/// This rank's world, as reported by its launcher.
struct World {
  Launcher launcher = Launcher::none;
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::optional<std::string> segment;  ///< LOCKSTEP_SEGMENT
  /// An id shared by this job's ranks on this host, unique among concurrent jobs of this user;
  /// empty if the launcher gives none.
  std::string job;
  std::optional<std::string> record_dir{};  ///< LOCKSTEP_RECORD_DIR
};

}  // namespace lockstep::internal
