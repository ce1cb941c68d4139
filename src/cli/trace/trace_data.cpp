#include "cli/trace/trace_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

namespace lockstep::cli::tracing {

std::uint32_t Texts::number(std::string_view text) {
  if (const auto found = numbers_.find(text); found != numbers_.end()) return found->second;
  const auto number = static_cast<std::uint32_t>(texts_.size());
  numbers_.emplace(texts_.emplace_back(text), number);
  return number;
}

std::string name_of(const Row& row) {
  std::string name = fmt::format("rank {}", row.rank);
  if (row.n_restarts > 0) name += fmt::format(", restart {}", row.n_restarts);
  if (row.world > 0 && row.n_restarts == 0) name += fmt::format(", world {}", row.world);
  return name;
}

std::vector<Wait> waits_of(const Trace& trace) {
  struct Last {
    std::int64_t start_ns = INT64_MIN;
    std::uint32_t row = 0;
  };
  using GroupKey = std::pair<int, std::uint32_t>;  // world, name
  std::map<GroupKey, std::unordered_map<std::uint64_t, Last>> groups;
  const auto collectives_of = [&](const Event& event) -> auto& {
    return groups[{trace.rows[event.row].world, event.group}];
  };
  for (const Event& event : trace.events) {
    if (event.kind != Event::Kind::collective) continue;
    Last& last = collectives_of(event)[event.collective];
    if (event.start_ns >= last.start_ns) {
      last.start_ns = event.start_ns;
      last.row = event.row;
    }
  }
  std::vector<Wait> waits(trace.events.size());
  for (std::size_t i = 0; i < waits.size(); ++i) {
    const Event& event = trace.events[i];
    if (event.kind != Event::Kind::collective || event.state == Event::State::under_way) continue;
    const Last& last = collectives_of(event).at(event.collective);
    if (last.row == event.row || last.start_ns > event.end_ns) continue;
    waits[i] = {.n_ns = last.start_ns - event.start_ns, .row = last.row};
  }
  return waits;
}

}  // namespace lockstep::cli::tracing
