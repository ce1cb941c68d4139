#pragma once

#include <string>

namespace lockstep::cli {

/// `lockstep doctor --record DIR`: finds in the flight records that lie there where the ranks
/// parted, and prints it. Returns the exit code. Throws UsageError where they are no records of one
/// job.
int doctor_record(const std::string& dir);

}  // namespace lockstep::cli
