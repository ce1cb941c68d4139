#include <fmt/format.h>

#include <algorithm>
#include <lockstep/error.hpp>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "cli/trace/trace_data.hpp"

namespace lockstep::cli::tracing {
namespace {

/// Collectives that no rank leaves before all have entered.
bool is_synchronizing(const std::string& name) {
  return name == "barrier" || name == "all_reduce" || name == "all_gather" ||
         name == "reduce_scatter" || name == "all_to_all";
}

/// The last start and first end of one collective among the ranks of one trace.
struct CommonTime {
  std::int64_t start_ns = INT64_MIN;
  std::int64_t end_ns = INT64_MAX;
};

using CollectiveKey = std::tuple<int, std::string, std::uint64_t>;  // world, group, collective

std::map<CollectiveKey, CommonTime> common_times_of(const Trace& trace) {
  std::map<CollectiveKey, CommonTime> times;
  for (const Event& event : trace.events) {
    if (event.kind != Event::Kind::collective || event.state != Event::State::finished ||
        !is_synchronizing(trace.texts[event.name])) {
      continue;
    }
    CommonTime& time =
        times[{trace.rows[event.row].world, trace.texts[event.group], event.collective}];
    time.start_ns = std::max(time.start_ns, event.start_ns);
    time.end_ns = std::min(time.end_ns, event.end_ns);
  }
  return times;
}

/// What to add to b's times to get a's. In every such collective, each side's first end is later
/// than the other side's last start, which bounds the correction on both sides.
Correction correction_of(const std::map<CollectiveKey, CommonTime>& of_a, const Trace& a,
                         const Trace& b) {
  std::int64_t least = INT64_MIN;
  std::int64_t most = INT64_MAX;
  for (const auto& [key, in_b] : common_times_of(b)) {
    const auto found = of_a.find(key);
    if (found == of_a.end()) continue;
    const CommonTime& in_a = found->second;
    least = std::max(least, in_a.start_ns - in_b.end_ns);
    most = std::min(most, in_a.end_ns - in_b.start_ns);
  }
  if (most == INT64_MAX) return {b.clock, b.wall_ns - a.wall_ns, /*within_ns=*/-1};
  // The bounds of drifting clocks cross: then it is off by this much at both ends.
  return {b.clock, least + (most - least) / 2, std::abs(most - least) / 2};
}

void append(Trace& to, const Trace& from, std::int64_t added_ns) {
  const auto first_row = static_cast<std::uint32_t>(to.rows.size());
  for (const Row& row : from.rows) {
    if (std::any_of(to.rows.begin(), to.rows.end(),
                    [&](const Row& other) { return other.pid == row.pid; })) {
      throw UsageError(
          {.operation = "lockstep trace merge"},
          fmt::format("{} is in two of the traces: give one trace per node, all of one job",
                      name_of(row)));
    }
    to.rows.push_back(row);
  }
  for (Thread thread : from.threads) {
    thread.row += first_row;
    to.threads.push_back(std::move(thread));
  }
  const auto number = [&](std::uint32_t text) { return to.texts.number(from.texts[text]); };
  for (Event event : from.events) {
    event.row += first_row;
    event.start_ns += added_ns;
    event.end_ns += added_ns;
    event.name = number(event.name);
    event.group = number(event.group);
    event.type = number(event.type);
    event.where = number(event.where);
    to.events.push_back(event);
  }
}

}  // namespace

Trace merge(std::vector<Trace> traces) {
  Trace merged = std::move(traces.front());
  const auto times = common_times_of(merged);
  for (auto trace = traces.begin() + 1; trace != traces.end(); ++trace) {
    std::int64_t added_ns = 0;
    if (trace->clock != merged.clock) {
      merged.corrections.push_back(correction_of(times, merged, *trace));
      added_ns = merged.corrections.back().added_ns;
    }
    for (Correction& correction : trace->corrections) {
      correction.added_ns += added_ns;
      merged.corrections.push_back(std::move(correction));
    }
    append(merged, *trace, added_ns);
    *trace = {};
  }
  return merged;
}

}  // namespace lockstep::cli::tracing
