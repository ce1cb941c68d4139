#include "cli/job_state.hpp"

#include <algorithm>

#include "base/process.hpp"
#include "engines/shared/segment/membership.hpp"

namespace lockstep::cli {
namespace {

using shared::RankBlock;
using shared::RankState;

/// Whether the rank's pid is of this PID namespace; otherwise it may name another process here.
bool has_pid_here(const RankBlock& rank) {
  return shared::is_pid_of(base::namespace_of("pid"), rank).value_or(false);
}

std::string state_of(const RankBlock& rank) {
  const int status = rank.wait_status_plus_one.load(std::memory_order_acquire);
  if (status != 0) return "ended";
  switch (rank.state.load(std::memory_order_acquire)) {
    case RankState::absent: return "starting";
    case RankState::left: return "left";
    case RankState::failed: return "failed";
    case RankState::alive: break;
  }
  if (!has_pid_here(rank)) return "unknown";
  const pid_t pid = rank.pid.load(std::memory_order_relaxed);
  switch (base::process_state(pid, rank.start_time.load(std::memory_order_relaxed))) {
    case base::ProcessState::running: return "running";
    case base::ProcessState::sleeping: return "sleeping";
    case base::ProcessState::stopped: return "stopped";
    case base::ProcessState::alive: return "alive";
    case base::ProcessState::gone: return "dead";
    case base::ProcessState::unknown: return "unknown";
  }
  return "damaged";
}

RankSample read(const RankBlock& rank, int number) {
  const internal::FlightRecord& flight = rank.flight;
  RankSample row;
  row.rank = number;
  row.pid = rank.pid.load(std::memory_order_relaxed);
  row.state = state_of(rank);
  const std::size_t n_groups = internal::n_groups_of(flight);
  for (std::size_t i = 0; i < n_groups; ++i) {
    row.counters.n_calls += flight.groups[i].n_calls.load(std::memory_order_relaxed);
    row.counters.n_bytes += flight.groups[i].n_bytes.load(std::memory_order_relaxed);
  }
  const base::ProcessUse use = has_pid_here(rank) ? base::process_use(row.pid) : base::ProcessUse{};
  row.counters.cpu_s = use.cpu_s;
  row.memory_bytes = use.memory_bytes;
  row.operations = internal::operations_of(flight);
  for (const internal::Operation& operation : row.operations) {
    if (operation.state != internal::Operation::State::under_way) continue;
    row.current = &operation;
    break;
  }
  return row;
}

/// This row's rank in a group; nullopt if it is not a member.
std::optional<int> rank_in(const shared::Segment& segment, const RankSample& row,
                           std::string_view group) {
  const internal::FlightRecord& flight = segment.rank(row.rank).flight;
  const std::size_t n_groups = internal::n_groups_of(flight);
  for (std::size_t i = 1; i < n_groups; ++i) {
    if (internal::name_of(flight.groups[i]) == group) return flight.groups[i].rank;
  }
  return std::nullopt;
}

std::uint64_t last_collective(const shared::Segment& segment, const RankSample& row,
                              std::string_view group) {
  std::uint64_t last = 0;
  for (const internal::Operation& operation : row.operations) {
    if (group_of(segment, row, operation) == group) last = std::max(last, operation.collective);
  }
  return last;
}

/// The ranks that have not reached this rank's current operation.
std::vector<int> awaited(const shared::Segment& segment, const std::vector<RankSample>& rows,
                         const RankSample& row) {
  const internal::Operation& operation = *row.current;
  const std::string_view group = group_of(segment, row, operation);
  std::vector<int> result;
  for (const RankSample& other : rows) {
    if (other.rank == row.rank) continue;
    const auto number = rank_in(segment, other, group);
    const bool is_late = operation.collective == 0
                             ? number == operation.root
                             : (number || group == "world") &&
                                   last_collective(segment, other, group) < operation.collective;
    if (is_late) result.push_back(other.rank);
  }
  return result;
}

}  // namespace

std::string_view group_of(const shared::Segment& segment, const RankSample& row,
                          const internal::Operation& operation) {
  return internal::name_of(segment.rank(row.rank).flight.groups[operation.group]);
}

JobSample sample_job(const shared::Segment& segment, const std::optional<JobSample>& before) {
  JobSample sample{.time = std::chrono::steady_clock::now(), .rows = {}};
  for (int r = 0; r < segment.n_ranks(); ++r) sample.rows.push_back(read(segment.rank(r), r));
  for (RankSample& row : sample.rows) {
    if (row.current != nullptr) row.waits_for = awaited(segment, sample.rows, row);
    if (!before || before->rows.size() != sample.rows.size()) continue;
    const RankCounters& old = before->rows[static_cast<std::size_t>(row.rank)].counters;
    const double seconds = std::chrono::duration<double>(sample.time - before->time).count();
    if (seconds <= 0) continue;
    row.calls_per_s = static_cast<double>(row.counters.n_calls - old.n_calls) / seconds;
    row.bytes_per_s = static_cast<double>(row.counters.n_bytes - old.n_bytes) / seconds;
    row.cpu_percent = std::max(row.counters.cpu_s - old.cpu_s, 0.0) / seconds * 100;
  }
  return sample;
}

}  // namespace lockstep::cli
