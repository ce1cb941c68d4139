#pragma once

#include "base/cpu_model.hpp"
#include "engines/shared/bootstrap/tuning.hpp"

namespace lockstep::shared {

/// The values for that CPU, by its vendor and its L2 cache.
Tuning measured_for(int n_ranks, const base::CpuModel& cpu);

}  // namespace lockstep::shared
