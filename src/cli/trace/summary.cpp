#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "cli/trace/trace_data.hpp"

namespace lockstep::cli::tracing {
namespace {

/// Three or four digits, with a unit.
std::string time_of(std::int64_t n_ns) {
  const auto value = static_cast<double>(n_ns);
  if (n_ns >= 1'000'000'000) return fmt::format("{:.3f} s", value / 1e9);
  if (n_ns >= 1'000'000) return fmt::format("{:.2f} ms", value / 1e6);
  return fmt::format("{:.2f} us", value / 1e3);
}

std::string bytes_of(std::uint64_t n_bytes) {
  const auto value = static_cast<double>(n_bytes);
  if (n_bytes >= 1'000'000'000) return fmt::format("{:.2f} GB", value / 1e9);
  if (n_bytes >= 1'000'000) return fmt::format("{:.2f} MB", value / 1e6);
  if (n_bytes >= 1'000) return fmt::format("{:.2f} kB", value / 1e3);
  return fmt::format("{} B", n_bytes);
}

std::string percent(std::int64_t part, std::int64_t whole) {
  const double share = whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
  return fmt::format("{:.1f} %", 100 * share);
}

std::string count_of(std::size_t n, const char* one, const char* several) {
  return fmt::format("{} {}", n, n == 1 ? one : several);
}

/// Calls of one operation, or regions of one name, over all ranks.
struct Total {
  std::string_view name{};
  std::uint64_t n = 0;
  std::uint64_t n_bytes = 0;
  std::int64_t time_ns = 0;
  std::int64_t longest_ns = 0;
  std::int64_t waiting_ns = 0;
};

struct RankTotals {
  std::int64_t first_ns = INT64_MAX;
  std::int64_t last_ns = INT64_MIN;
  std::int64_t calls_ns = 0;
  std::int64_t waiting_ns = 0;
  std::int64_t awaited_ns = 0;  ///< time the peers waited for it
  std::uint64_t n_open = 0;
};

using Totals = std::map<std::uint32_t, Total>;  // by name

std::vector<Total> longest_first(const Totals& totals, const Texts& names) {
  std::vector<Total> sorted;
  for (const auto& [name, total] : totals) {
    sorted.push_back(total);
    sorted.back().name = names[name];
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Total& a, const Total& b) { return a.time_ns > b.time_ns; });
  return sorted;
}

std::string missing_data_text(const Trace& trace, const std::vector<RankTotals>& ranks) {
  std::string text;
  auto out = std::back_inserter(text);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const Row& row = trace.rows[i];
    if (row.n_lost > 0) {
      fmt::format_to(out, "{}: the last {} events are missing: {}\n", name_of(row), row.n_lost,
                     row.why_lost);
    }
    if (ranks[i].n_open > 0) {
      fmt::format_to(out, "{}: {} never ended and are not counted\n", name_of(row),
                     count_of(ranks[i].n_open, "call or region", "calls or regions"));
    }
  }
  for (const Correction& correction : trace.corrections) {
    if (correction.within_ns < 0) {
      fmt::format_to(out, "a clock corrected by the hosts' times of day: no call connects them\n");
    } else {
      fmt::format_to(out,
                     "a clock corrected by {} s: times of its ranks are accurate to within {}\n",
                     static_cast<double>(correction.added_ns) / 1e9, time_of(correction.within_ns));
    }
  }
  return text;
}

std::string slowest(const Trace& trace, const std::vector<RankTotals>& ranks) {
  std::int64_t waiting_ns = 0;
  for (const RankTotals& rank : ranks) waiting_ns += rank.waiting_ns;
  if (waiting_ns == 0) return "No rank waited for another\n";
  const auto most = std::max_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) {
    return a.awaited_ns < b.awaited_ns;
  });
  const Row& row = trace.rows[static_cast<std::size_t>(most - ranks.begin())];
  return fmt::format("Slowest: {}. The others waited {} for it, {} of the waiting of all ranks\n",
                     name_of(row), time_of(most->awaited_ns),
                     percent(most->awaited_ns, waiting_ns));
}

}  // namespace

std::string summary_of(const Trace& trace) {
  Totals calls;
  Totals regions;
  std::vector<RankTotals> ranks(trace.rows.size());
  std::int64_t first_ns = INT64_MAX;
  std::int64_t last_ns = INT64_MIN;
  const std::vector<Wait> waits = waits_of(trace);
  for (std::size_t i = 0; i < waits.size(); ++i) {
    const Event& event = trace.events[i];
    RankTotals& rank = ranks[event.row];
    if (event.state == Event::State::under_way) {
      ++rank.n_open;
      continue;
    }
    rank.first_ns = std::min(rank.first_ns, event.start_ns);
    rank.last_ns = std::max(rank.last_ns, event.end_ns);
    const bool is_call = event.kind != Event::Kind::region;
    const std::int64_t time_ns = event.end_ns - event.start_ns;
    Total& total = (is_call ? calls : regions)[event.name];
    ++total.n;
    total.n_bytes += event.n_bytes;
    total.time_ns += time_ns;
    total.longest_ns = std::max(total.longest_ns, time_ns);
    if (!is_call) continue;
    total.waiting_ns += waits[i].n_ns;
    rank.calls_ns += time_ns;
    rank.waiting_ns += waits[i].n_ns;
    ranks[waits[i].row].awaited_ns += waits[i].n_ns;
  }
  std::set<std::string> hosts;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    hosts.insert(trace.rows[i].host);
    first_ns = std::min(first_ns, ranks[i].first_ns);
    last_ns = std::max(last_ns, ranks[i].last_ns);
  }
  const std::int64_t span_ns =
      std::max<std::int64_t>(0, first_ns < last_ns ? last_ns - first_ns : 0);

  std::string text =
      fmt::format("{} on {}, {} in {}\n", count_of(ranks.size(), "rank", "ranks"),
                  count_of(hosts.size(), "host", "hosts"),
                  count_of(trace.events.size(), "event", "events"), time_of(span_ns));
  auto out = std::back_inserter(text);
  text += missing_data_text(trace, ranks);
  fmt::format_to(out, "\n{:<24} {:>9} {:>10} {:>11} {:>11} {:>11} {:>8}\n", "operation", "calls",
                 "bytes", "all ranks", "mean", "longest", "waiting");
  for (const Total& total : longest_first(calls, trace.texts)) {
    fmt::format_to(out, "{:<24} {:>9} {:>10} {:>11} {:>11} {:>11} {:>8}\n", total.name, total.n,
                   bytes_of(total.n_bytes), time_of(total.time_ns),
                   time_of(total.time_ns / static_cast<std::int64_t>(total.n)),
                   time_of(total.longest_ns), percent(total.waiting_ns, total.time_ns));
  }
  if (!regions.empty()) {
    fmt::format_to(out, "\n{:<24} {:>9} {:>10} {:>11} {:>11} {:>11}\n", "region", "times", "",
                   "all ranks", "mean", "longest");
  }
  for (const Total& total : longest_first(regions, trace.texts)) {
    fmt::format_to(out, "{:<24} {:>9} {:>10} {:>11} {:>11} {:>11}\n", total.name, total.n, "",
                   time_of(total.time_ns),
                   time_of(total.time_ns / static_cast<std::int64_t>(total.n)),
                   time_of(total.longest_ns));
  }
  fmt::format_to(out, "\n{:<24} {:>9} {:>10} {:>11} {:>11} {:>11}\n", "rank", "time", "in calls",
                 "waiting", "share", "awaited");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const RankTotals& rank = ranks[i];
    const std::int64_t time_ns = rank.first_ns < rank.last_ns ? rank.last_ns - rank.first_ns : 0;
    fmt::format_to(out, "{:<24} {:>9} {:>10} {:>11} {:>11} {:>11}\n", name_of(trace.rows[i]),
                   time_of(time_ns), time_of(rank.calls_ns), time_of(rank.waiting_ns),
                   percent(rank.waiting_ns, time_ns), time_of(rank.awaited_ns));
  }
  return text + "\n" + slowest(trace, ranks);
}

}  // namespace lockstep::cli::tracing
