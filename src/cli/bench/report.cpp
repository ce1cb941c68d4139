#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <lockstep/error.hpp>
#include <map>
#include <optional>

#include "cli/bench/bench.hpp"

namespace lockstep::bench {
namespace {

std::string bytes_text(std::uint64_t n) {
  if (n >= (1U << 20) && n % (1U << 20) == 0) return fmt::format("{} MiB", n >> 20);
  if (n >= (1U << 10) && n % (1U << 10) == 0) return fmt::format("{} KiB", n >> 10);
  return fmt::format("{} B", n);
}

std::string time_text(double us) {
  return us < 10     ? fmt::format("{:.3f}", us)
         : us < 1000 ? fmt::format("{:.1f}", us)
                     : fmt::format("{:.0f}", us);
}

std::vector<std::string> entrants_of(const std::vector<Row>& rows) {
  std::vector<std::string> names;
  for (const Row& row : rows) {
    if (std::find(names.begin(), names.end(), row.entrant) == names.end()) {
      names.push_back(row.entrant);
    }
  }
  return names;
}

/// The best peer's time over our best time.
std::optional<double> ratio_of(const std::vector<const Row*>& rows) {
  double mine = std::numeric_limits<double>::infinity();
  double theirs = mine;
  for (const Row* row : rows) {
    if (row->p50_us == 0) continue;
    double& best = row->family == "lockstep" ? mine : theirs;
    best = std::min(best, row->p50_us);
  }
  if (mine == std::numeric_limits<double>::infinity() || theirs > 1e300) return std::nullopt;
  return theirs / mine;
}

using Key = std::pair<Operation, std::uint64_t>;

std::map<Key, std::vector<const Row*>> by_size(const std::vector<Row>& rows) {
  std::map<Key, std::vector<const Row*>> sizes;
  for (const Row& row : rows) sizes[{row.operation, row.n_bytes}].push_back(&row);
  return sizes;
}

/// Mean over the blocks; nothing if they were not measured.
std::optional<double> foreign_share(const std::vector<Row>& rows) {
  double total = 0;
  std::size_t n = 0;
  for (const Row& row : rows) {
    for (const auto& [placement, figures] : row.by_placement) {
      for (const Sample& block : figures.blocks) total += block.foreign;
      n += figures.blocks.size();
    }
  }
  if (n == 0) return std::nullopt;
  return total / static_cast<double>(n);
}

nlohmann::json json_of(const Figures& figures) {
  nlohmann::json blocks = nlohmann::json::array();
  for (const Sample& block : figures.blocks) {
    blocks.push_back({{"p50_us", block.p50_us},
                      {"p99_us", block.p99_us},
                      {"one_way_ns", block.one_way_ns},
                      {"foreign", block.foreign}});
  }
  return {{"p50_us", figures.p50_us}, {"p99_us", figures.p99_us}, {"blocks", std::move(blocks)}};
}

/// Quoted for gnuplot, whatever the word contains.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) result += c == '"' || c == '\\' ? ' ' : c;
  return result + '"';
}

}  // namespace

std::string_view name_of(Operation operation) {
  switch (operation) {
    case Operation::barrier: return "barrier";
    case Operation::all_reduce: return "all_reduce";
    case Operation::broadcast: return "broadcast";
    case Operation::all_gather: return "all_gather";
    case Operation::reduce_scatter: return "reduce_scatter";
    case Operation::all_to_all: return "all_to_all";
  }
  return "unknown";
}

std::string_view name_of(Type type) {
  switch (type) {
    case Type::u8: return "u8";
    case Type::i32: return "i32";
    case Type::i64: return "i64";
    case Type::f16: return "f16";
    case Type::bf16: return "bf16";
    case Type::f32: return "f32";
    case Type::f64: return "f64";
  }
  return "unknown";
}

std::string_view name_of(Mode mode) {
  switch (mode) {
    case Mode::warm: return "warm";
    case Mode::touch: return "touch";
    case Mode::fresh: return "fresh";
  }
  return "unknown";
}

std::string_view name_of(Placement placement) {
  switch (placement) {
    case Placement::siblings: return "siblings";
    case Placement::near: return "near";
    case Placement::far: return "far";
  }
  return "unknown";
}

std::string table_of(const Plan& plan, const std::vector<Row>& rows) {
  const std::vector<std::string> entrants = entrants_of(rows);
  const bool has_peers = std::any_of(rows.begin(), rows.end(),
                                     [](const Row& row) { return row.family != "lockstep"; });
  std::string text = fmt::format(
      "{} ranks, {}, {} buffers{}; median us of a call (p99), ours in GB/s\n", plan.n_ranks,
      name_of(plan.type), name_of(plan.mode), plan.in_shared_memory ? " in shared memory" : "");
  std::optional<Operation> operation;
  for (const auto& [key, row_of_size] : by_size(rows)) {
    if (operation != key.first) {
      operation = key.first;
      text += fmt::format("\n{:<16}", name_of(*operation));
      for (const std::string& name : entrants) text += fmt::format("{:>26}", name);
      text += fmt::format("{:>8}{:>8}{}  placement\n", "alg", "bus",
                          has_peers ? "   best peer / ours" : "");
    }
    text += fmt::format("{:<16}", *operation == Operation::barrier ? "" : bytes_text(key.second));
    const Row* mine = nullptr;
    for (const std::string& name : entrants) {
      const auto found = std::find_if(row_of_size.begin(), row_of_size.end(),
                                      [&](const Row* row) { return row->entrant == name; });
      if (found == row_of_size.end() || (*found)->p50_us == 0) {
        text += fmt::format("{:>26}", "-");
        continue;
      }
      text += fmt::format("{:>26}", fmt::format("{} ({})", time_text((*found)->p50_us),
                                                time_text((*found)->p99_us)));
      if (mine == nullptr && (*found)->family == "lockstep") mine = *found;
    }
    text += mine == nullptr ? fmt::format("{:>8}{:>8}", "-", "-")
                            : fmt::format("{:>8.2f}{:>8.2f}", mine->algorithm_gb_s, mine->bus_gb_s);
    if (has_peers) {
      const auto ratio = ratio_of(row_of_size);
      text += fmt::format("{:>19}", ratio ? fmt::format("{:.2f}", *ratio) : "-");
    }
    text += fmt::format("  {}\n", name_of(row_of_size.front()->placement));
  }
  constexpr double kBusy = 0.05;
  if (const auto share = foreign_share(rows); share && *share > kBusy) {
    text += fmt::format("\nother programs, or the host, took {:.0f} % of the cores' time\n",
                        100 * *share);
  }
  for (const Row& row : rows) {
    if (!row.error.empty()) {
      text += fmt::format("\n{} {} {}: {}", row.entrant, name_of(row.operation),
                          bytes_text(row.n_bytes), row.error);
    }
  }
  return text;
}

nlohmann::json json_of(const Plan& plan, const std::vector<Row>& rows) {
  nlohmann::json json = {{"ranks", plan.n_ranks},          {"type", name_of(plan.type)},
                         {"mode", name_of(plan.mode)},     {"shared_memory", plan.in_shared_memory},
                         {"pinned", !plan.cores.empty()},  {"blocks", plan.n_blocks},
                         {"rows", nlohmann::json::array()}};
  for (const Row& row : rows) {
    nlohmann::json entry = {{"operation", name_of(row.operation)},
                            {"bytes", row.n_bytes},
                            {"entrant", row.entrant},
                            {"family", row.family}};
    if (row.p50_us > 0) {
      entry.update({{"p50_us", row.p50_us},
                    {"p99_us", row.p99_us},
                    {"algorithm_gb_s", row.algorithm_gb_s},
                    {"bus_gb_s", row.bus_gb_s},
                    {"placement", name_of(row.placement)}});
    }
    for (const auto& [placement, figures] : row.by_placement) {
      entry["placements"][std::string(name_of(placement))] = json_of(figures);
    }
    if (row.n_moved > 0) entry["moved"] = row.n_moved;
    if (!row.error.empty()) entry["error"] = row.error;
    json["rows"].push_back(std::move(entry));
  }
  return json;
}

void draw(const Plan& plan, const std::vector<Row>& rows, const std::string& path) {
  std::FILE* gnuplot = ::popen("gnuplot", "w");
  if (gnuplot == nullptr)
    throw SystemError({.operation = "lockstep bench"}, errno, "start gnuplot");
  std::string script = fmt::format(
      "set terminal svg size 800,{} background rgb 'white' font 'sans-serif,12'\nset output {}\n"
      "set multiplot layout {},1\nset logscale xy\nset format x '%.0s %cB'\n"
      "set ylabel 'microseconds'\nset key outside right\nset grid\n",
      400 * plan.operations.size(), quoted(path), plan.operations.size());
  for (const Operation operation : plan.operations) {
    std::string plots;
    std::string data;
    for (const std::string& name : entrants_of(rows)) {
      std::string points;
      for (const Row& row : rows) {
        if (row.operation == operation && row.entrant == name && row.p50_us > 0) {
          points += fmt::format("{} {}\n", std::max<std::uint64_t>(row.n_bytes, 1), row.p50_us);
        }
      }
      if (points.empty()) continue;
      plots +=
          fmt::format("{}'-' with linespoints title {}", plots.empty() ? "" : ", ", quoted(name));
      data += points + "e\n";
    }
    if (plots.empty()) continue;
    script += fmt::format("set title '{}, {} ranks, {}'\nplot {}\n{}", name_of(operation),
                          plan.n_ranks, name_of(plan.type), plots, data);
  }
  std::fputs(script.c_str(), gnuplot);
  const int status = ::pclose(gnuplot);
  if (status != 0) {
    throw EngineError({.operation = "lockstep bench"},
                      fmt::format("gnuplot could not draw {} (is gnuplot installed?)", path));
  }
}

}  // namespace lockstep::bench
