#pragma once

#include <string>

namespace lockstep::cli {

/// `lockstep doctor --record DIR`: finds where the ranks diverged in the flight records in DIR, and
/// prints it. Returns the exit code. Throws UsageError if they are not the records of one
/// job.
int doctor_record(const std::string& dir);

}  // namespace lockstep::cli
