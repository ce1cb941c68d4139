#pragma once

#include "base/layout_hash.hpp"
#include "record/flight_record.hpp"

namespace lockstep::internal {

/// The layout of a FlightRecord, which other processes read in shared memory and in files.
consteval base::LayoutHash flight_layout() {
  base::LayoutHash hash;
  hash.add<FlightEntry>({
      LOCKSTEP_FIELD(FlightEntry, begun),
      LOCKSTEP_FIELD(FlightEntry, sequence),
      LOCKSTEP_FIELD(FlightEntry, signature),
      LOCKSTEP_FIELD(FlightEntry, count),
      LOCKSTEP_FIELD(FlightEntry, start),
      LOCKSTEP_FIELD(FlightEntry, end),
      LOCKSTEP_FIELD(FlightEntry, collective),
      LOCKSTEP_FIELD(FlightEntry, site),
      LOCKSTEP_FIELD(FlightEntry, group),
      LOCKSTEP_FIELD(FlightEntry, complete),
  });
  hash.add<FlightGroup>({
      LOCKSTEP_FIELD(FlightGroup, n_calls),
      LOCKSTEP_FIELD(FlightGroup, n_bytes),
      LOCKSTEP_FIELD(FlightGroup, rank),
      LOCKSTEP_FIELD(FlightGroup, size),
      LOCKSTEP_FIELD(FlightGroup, name),
  });
  hash.add<FlightRecord>({
      LOCKSTEP_FIELD(FlightRecord, n_blocks),
      LOCKSTEP_FIELD(FlightRecord, rank),
      LOCKSTEP_FIELD(FlightRecord, world_size),
      LOCKSTEP_FIELD(FlightRecord, job),
      LOCKSTEP_FIELD(FlightRecord, pid),
      LOCKSTEP_FIELD(FlightRecord, n_sites),
      LOCKSTEP_FIELD(FlightRecord, n_groups),
      LOCKSTEP_FIELD(FlightRecord, is_written),
      LOCKSTEP_FIELD(FlightRecord, generation_plus_one),
      LOCKSTEP_FIELD(FlightRecord, anchor_ticks),
      LOCKSTEP_FIELD(FlightRecord, anchor_ns),
      LOCKSTEP_FIELD(FlightRecord, entries),
      LOCKSTEP_FIELD(FlightRecord, groups),
      LOCKSTEP_FIELD(FlightRecord, sites),
  });
  return hash;
}

}  // namespace lockstep::internal
