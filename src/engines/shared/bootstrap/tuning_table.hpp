#pragma once

#include "base/cpu_model.hpp"
#include "engines/shared/bootstrap/tuning.hpp"

namespace lockstep::shared {

/// The best measured values for that CPU, or an estimate from its L2 cache if it was not measured.
Tuning measured_for(int n_ranks, const base::CpuModel& cpu);

}  // namespace lockstep::shared
