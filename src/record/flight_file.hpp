#pragma once

#include <memory>
#include <optional>
#include <string>

#include "record/flight_record.hpp"

/// The memory of a flight record that a rank leaves when it is killed, where no launcher and no
/// peer on its host can read that memory: a file of LOCKSTEP_RECORD_DIR.
namespace lockstep::internal {

/// A record in DIR/rank-N.flight, which is removed with the memory: a rank that ends leaves none.
/// Null where there is no room for it.
std::shared_ptr<FlightRecord> make_flight_file(const std::string& dir, int rank) noexcept;

/// The record of a rank that never gave it up, as text of its rank-N.json. nullopt where the file
/// is none, or of another version, or the rank has written its record itself.
std::optional<std::string> read_flight_file(const std::string& path);

}  // namespace lockstep::internal
