#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <lockstep/error.hpp>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cli/bench/bench.hpp"

namespace lockstep::bench {
namespace {

constexpr const char* kNever = "1099511627776";  // larger than any message here

/// Medians by setting and size; a setting without figures for a size is omitted there.
using Medians = std::map<std::uint64_t, std::map<std::string, double>>;

/// Teams of ours with different LOCKSTEP_TUNE, measured in alternation.
Medians compare(Plan plan, const std::vector<std::string>& settings,
                std::vector<std::uint64_t> sizes) {
  plan.operations = {Operation::all_reduce};
  plan.sizes = std::move(sizes);
  std::vector<std::unique_ptr<Team>> teams;
  for (const std::string& setting : settings) {
    Entrant entrant = ours(plan.n_ranks, /*with_processes=*/true, /*with_threads=*/false).front();
    entrant.name = setting;
    entrant.command.insert(entrant.command.begin(), {"env", "LOCKSTEP_TUNE=" + setting});
    teams.push_back(std::make_unique<Team>(entrant, plan.n_ranks, plan.cores));
  }
  Medians medians;
  for (const Row& row : measure_all(plan, teams, [](Operation, std::uint64_t) {})) {
    if (row.p50_us > 0) medians[row.n_bytes][row.entrant] = row.p50_us;
  }
  return medians;
}

std::vector<std::uint64_t> doubling(std::uint64_t first, std::uint64_t last,
                                    std::uint64_t factor = 2) {
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t size = first; size <= last; size *= factor) sizes.push_back(size);
  return sizes;
}

/// The largest size before `other` becomes faster.
std::uint64_t last_before(const Medians& medians, const std::string& setting,
                          const std::string& other) {
  std::uint64_t last = 0;
  for (const auto& [n_bytes, us] : medians) {
    if (!us.contains(setting) || !us.contains(other)) continue;
    if (us.at(other) < us.at(setting)) return last;
    last = n_bytes;
  }
  return std::stoull(kNever);
}

}  // namespace

std::string tuned(const Plan& plan) {
  constexpr std::uint64_t kKiB = 1024;
  const std::string never = kNever;
  const std::uint64_t flat =
      last_before(compare(plan, {"flat=" + never, "flat=0"}, doubling(kKiB / 2, 1024 * kKiB)),
                  "flat=" + never, "flat=0");

  std::vector<std::string> chunks;
  for (const std::uint64_t size : doubling(16 * kKiB, 256 * kKiB)) {
    chunks.push_back(fmt::format("flat={},chunk={}", flat, size));
  }
  const Medians by_chunk = compare(plan, chunks, doubling(1024 * kKiB, 16 * 1024 * kKiB, 4));
  // The smallest product of the times, over the sizes for which all have figures.
  std::map<std::string, double> logarithms;
  for (const auto& [n_bytes, us] : by_chunk) {
    if (us.size() < chunks.size()) continue;
    for (const auto& [chunk, time] : us) logarithms[chunk] += std::log(time);
  }
  if (logarithms.empty()) {
    throw EngineError({.operation = "lockstep bench --tune"},
                      "the cores moved during every block; try again, or with more --blocks");
  }
  const std::string best =
      std::min_element(logarithms.begin(), logarithms.end(), [](const auto& a, const auto& b) {
        return a.second < b.second;
      })->first;

  Plan touching = plan;
  touching.mode = Mode::touch;
  touching.in_shared_memory = true;
  const std::uint64_t copied =
      last_before(compare(touching, {"inplace=" + never, "inplace=0"}, doubling(512, 64 * kKiB)),
                  "inplace=" + never, "inplace=0");
  return fmt::format("LOCKSTEP_TUNE={},inplace={}", best, copied + 1);
}

}  // namespace lockstep::bench
