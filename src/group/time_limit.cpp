#include "base/job_clock.hpp"

#include <lockstep/detail/time_limit.hpp>

namespace lockstep::detail {

JobClock::time_point JobClock::now() noexcept { return time_point(base::job_time()); }

}  // namespace lockstep::detail
