#pragma once

#include "base/fd.hpp"

namespace lockstep::run {

/// A way for a rank to write and the launcher to read, both ends close-on-exec; the launcher's
/// does not block.
struct OutputPair {
  base::UniqueFd launcher_end;
  base::UniqueFd rank_end;
};

/// Throws SystemError.
OutputPair open_pipe();

/// A pseudo-terminal that passes bytes on unchanged, as wide as the terminal `like` less room for
/// a prefix: to the rank it looks as it would without a launcher, so that it writes line by line
/// and shows its progress bars and colours. Throws SystemError.
OutputPair open_terminal(int like);

}  // namespace lockstep::run
