#pragma once

#include "base/cpu_model.hpp"
#include "engines/shared/bootstrap/tuning.hpp"

namespace lockstep::shared {

/// What was measured to be best on that CPU, or where it is none that was measured, what its
/// second-level cache lets expect.
Tuning measured_for(int n_ranks, const base::CpuModel& cpu);

}  // namespace lockstep::shared
