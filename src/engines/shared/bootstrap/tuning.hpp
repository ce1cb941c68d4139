#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::shared {

/// Where a channel changes its algorithm. Every rank uses what the channel's maker wrote into its
/// header, for ranks that disagreed would wait for different phases.
struct Tuning {
  /// Messages up to here are reduced whole by every rank: one phase for each chunk. Above, each
  /// rank reduces a slice and shows it.
  std::uint64_t flat_bytes;
  /// Of one phase of a pipeline, at most a slot.
  std::uint64_t chunk_bytes;
  /// From here, two phases on `allocate`d memory cost less than copying in and out.
  std::uint64_t in_place_bytes;
};

/// What was measured to be best, with what LOCKSTEP_TUNE says instead. Throws UsageError where it
/// says something else than Env::tune allows.
Tuning tuning_for(int n_ranks, const std::optional<std::string>& variable);
/// With this process's LOCKSTEP_TUNE.
Tuning tuning_for(int n_ranks);

}  // namespace lockstep::shared
