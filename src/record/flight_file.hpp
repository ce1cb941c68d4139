#pragma once

#include <memory>
#include <optional>
#include <string>

#include "record/flight_record.hpp"

/// A flight record in a file of LOCKSTEP_RECORD_DIR, which remains when the rank is killed and
/// neither a launcher nor a peer on its host can read the rank's memory.
namespace lockstep::internal {

/// A record in DIR/rank-N.flight, removed with the memory: a rank that ends normally leaves none.
/// Null if there is no space for it.
std::shared_ptr<FlightRecord> make_flight_file(const std::string& dir, int rank) noexcept;

/// The record of a rank that never removed it, as text of its rank-N.json. nullopt if the file is
/// not a record, or of another version, or if the rank has written its record itself.
std::optional<std::string> read_flight_file(const std::string& path);

}  // namespace lockstep::internal
