#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/cpu_model.hpp"

namespace lockstep::shared {

/// The sizes at which a channel changes its algorithm. Every rank uses the values that the
/// channel's creator wrote into its header: ranks that disagree would wait for different phases.
struct Tuning {
  /// Up to this size, at most kInlineBytes, data is in the flags' own lines, above it in slots.
  std::uint64_t inline_bytes;
  /// Up to this size every rank reduces the entire message: one phase for each chunk. Above it,
  /// each rank reduces a slice and publishes it.
  std::uint64_t flat_bytes;
  /// The same where ranks share cores: a phase takes far longer there.
  std::uint64_t flat_bytes_oversubscribed;
  /// The most that one phase of a pipeline has, at most a slot: see Channel::chunk_bytes.
  std::uint64_t chunk_bytes;
  /// From this size, two phases on `allocate`d memory, or on any memory of ranks that are threads,
  /// cost less than copying in and out.
  std::uint64_t in_place_bytes;
};

/// The values that replace the default ones.
struct TuningOverrides {
  std::optional<std::uint64_t> inline_bytes;
  std::optional<std::uint64_t> flat_bytes;
  std::optional<std::uint64_t> chunk_bytes;
  std::optional<std::uint64_t> in_place_bytes;
};

/// Parses Env::tune. Throws UsageError.
TuningOverrides parse_tuning(const std::optional<std::string>& text);

/// By the CPU's vendor and its L2 cache.
Tuning default_tuning(int n_ranks, const base::CpuModel& cpu);

/// default_tuning of this CPU, or the values of `overrides`.
Tuning tuning_for(int n_ranks, const TuningOverrides& overrides);

}  // namespace lockstep::shared
