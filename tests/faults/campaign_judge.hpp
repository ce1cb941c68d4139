#pragma once

#include <string>

#include "cli/command.hpp"
#include "faults/campaign_trials.hpp"

namespace lockstep::test {

struct Outcome {
  std::string complaint;  ///< empty: all was right
  double latency_s = 0;   ///< from the fault (of late ranks: from the deadline) to the last report
  bool was_aborted = false;
  bool was_late = false;  ///< before the fault a rank was, of a training: it needs a longer limit
};

/// Of a job whose ranks have written their reports to `folder`.
Outcome judge(const Trial& trial, const std::string& folder, const Ended& ended);

}  // namespace lockstep::test
