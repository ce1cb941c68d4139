#include <fmt/format.h>

#include "base/plural.hpp"
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

std::string_view name_of(Mode mode) {
  switch (mode) {
    case Mode::warm: return "warm";
    case Mode::touch: return "touch";
    case Mode::fresh: return "fresh";
  }
  return "unknown";
}

std::string table_of(const Plan& plan, const std::vector<Row>& rows) {
  std::string text =
      fmt::format("{} rank{}, {}, {} buffers{}; median us of a call (p99), GB/s\n", plan.n_ranks,
                  base::plural(plan.n_ranks), name_of(plan.type), name_of(plan.mode),
                  plan.in_shared_memory ? " in shared memory" : "");
  const Row* before = nullptr;
  for (const Row& row : rows) {
    if (before == nullptr || before->operation != row.operation ||
        before->of_threads != row.of_threads) {
      text += fmt::format("\n{:<16}{:>26}{:>8}{:>8}\n", name_of(row.operation),
                          row.of_threads ? "threads" : "processes", "alg", "bus");
    }
    before = &row;
    text += fmt::format("{:<16}{:>26}{:>8.2f}{:>8.2f}\n",
                        row.operation == Operation::barrier ? "" : bytes_text(row.n_bytes),
                        fmt::format("{} ({})", time_text(row.p50_us), time_text(row.p99_us)),
                        row.algorithm_gb_s, row.bus_gb_s);
  }
  return text;
}

nlohmann::json json_of(const Plan& plan, const std::vector<Row>& rows) {
  nlohmann::json json = {{"ranks", plan.n_ranks},          {"type", name_of(plan.type)},
                         {"mode", name_of(plan.mode)},     {"shared_memory", plan.in_shared_memory},
                         {"pinned", !plan.cores.empty()},  {"blocks", plan.n_blocks},
                         {"rows", nlohmann::json::array()}};
  for (const Row& row : rows) {
    json["rows"].push_back({{"operation", name_of(row.operation)},
                            {"bytes", row.n_bytes},
                            {"ranks", row.of_threads ? "threads" : "processes"},
                            {"p50_us", row.p50_us},
                            {"p99_us", row.p99_us},
                            {"algorithm_gb_s", row.algorithm_gb_s},
                            {"bus_gb_s", row.bus_gb_s}});
  }
  return json;
}

}  // namespace lockstep::bench
