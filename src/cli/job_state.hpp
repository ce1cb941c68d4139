#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engines/shared/segment/segment.hpp"
#include "record/flight_record.hpp"

namespace lockstep::cli {

/// Counters of one rank, sampled once.
struct RankCounters {
  std::uint64_t n_calls = 0;
  std::uint64_t n_bytes = 0;
  double cpu_s = 0;
};

/// Current state of one rank.
struct RankSample {
  int rank = 0;
  pid_t pid = 0;
  std::string state;
  RankCounters counters;
  std::uint64_t memory_bytes = 0;
  double calls_per_s = 0;
  double bytes_per_s = 0;
  double cpu_percent = 0;
  std::vector<internal::Operation> operations;
  const internal::Operation* current = nullptr;  ///< the oldest unfinished one
  std::vector<int> waits_for;                    ///< world ranks
};

struct JobSample {
  std::chrono::steady_clock::time_point time;
  std::vector<RankSample> rows;
};

/// The current state of all ranks; rates since `before`, if it is of the same job.
JobSample sample_job(const shared::Segment& segment, const std::optional<JobSample>& before);

/// The name of the group of an operation of that rank.
std::string_view group_of(const shared::Segment& segment, const RankSample& row,
                          const internal::Operation& operation);

}  // namespace lockstep::cli
