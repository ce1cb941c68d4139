#pragma once

#include "base/fd.hpp"

namespace lockstep::run {

/// A channel from a rank to the launcher, both ends close-on-exec; the launcher's end is
/// non-blocking.
struct OutputPair {
  base::UniqueFd launcher_end;
  base::UniqueFd rank_end;
};

/// Throws SystemError.
OutputPair open_pipe();

/// A pseudo-terminal that passes bytes unchanged, as wide as the terminal `like` minus the prefix:
/// the rank sees a terminal as without a launcher, so it writes line by line and shows its progress
/// bars and colours. Throws SystemError.
OutputPair open_terminal(int like);

}  // namespace lockstep::run
