#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <lockstep/world.hpp>
#include <map>
#include <string>
#include <vector>

#include "cli/bench/bench.hpp"
#include "engines/shared/segment/layout.hpp"

namespace lockstep::bench {
namespace {

constexpr const char* kNever = "1099511627776";  // larger than any message here

/// Medians by size and setting.
using Medians = std::map<std::uint64_t, std::map<std::string, double>>;

/// Ranks with one LOCKSTEP_TUNE after the other, block by block.
Medians compare(Plan plan, const std::vector<std::string>& settings,
                std::vector<std::uint64_t> sizes) {
  const int n_rounds = plan.n_blocks;
  plan.operations = {Operation::all_reduce};
  plan.sizes = std::move(sizes);
  plan.n_blocks = 1;
  std::map<std::uint64_t, std::map<std::string, std::vector<double>>> times;
  for (int round = 0; round < n_rounds; ++round) {
    for (const std::string& setting : settings) {
      ::setenv("LOCKSTEP_TUNE", setting.c_str(), /*overwrite=*/1);
      // As under torchrun, where rank 0 makes the segment; `lockstep run` makes it with its own
      // LOCKSTEP_TUNE.
      init_dist({.launcher = Launcher::pytorch});
      for (const Row& row : measure(default_group(), plan, /*of_threads=*/false)) {
        times[row.n_bytes][setting].push_back(row.p50_us);
      }
      destroy_dist();
    }
  }
  Medians medians;
  for (const auto& [n_bytes, by_setting] : times) {
    for (const auto& [setting, us] : by_setting) medians[n_bytes][setting] = quantile(us, 0.5);
  }
  return medians;
}

std::vector<std::uint64_t> doubling(std::uint64_t first, std::uint64_t last,
                                    std::uint64_t factor = 2) {
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t size = first; size <= last; size *= factor) sizes.push_back(size);
  return sizes;
}

/// The largest size before the second setting becomes faster than the first.
std::uint64_t last_of_first(const Plan& plan, const std::string& first, const std::string& second,
                            std::vector<std::uint64_t> sizes) {
  std::uint64_t last = 0;
  for (const auto& [n_bytes, us] : compare(plan, {first, second}, std::move(sizes))) {
    if (us.at(second) < us.at(first)) return last;
    last = n_bytes;
  }
  return std::stoull(kNever);
}

}  // namespace

std::string tuned(const Plan& plan) {
  constexpr std::uint64_t kKiB = 1024;
  const std::string never = kNever;
  constexpr std::uint64_t kFirstLine = shared::kFirstLineBytes, kAllLines = shared::kInlineBytes;
  const std::uint64_t in_flags =
      last_of_first(plan, fmt::format("inline={}", kAllLines), fmt::format("inline={}", kFirstLine),
                    {64, 96, 128, 192, kAllLines});
  const std::uint64_t flat =
      last_of_first(plan, "flat=" + never, "flat=0", doubling(kKiB / 2, 1024 * kKiB));

  std::vector<std::string> chunks;
  for (const std::uint64_t size : doubling(16 * kKiB, 256 * kKiB)) {
    chunks.push_back(fmt::format("flat={},chunk={}", flat, size));
  }
  // The smallest product of the times.
  std::map<std::string, double> logarithms;
  for (const auto& [n_bytes, us] :
       compare(plan, chunks, doubling(1024 * kKiB, 16 * 1024 * kKiB, 4))) {
    for (const auto& [chunk, time] : us) logarithms[chunk] += std::log(time);
  }
  const std::string best =
      std::min_element(logarithms.begin(), logarithms.end(), [](const auto& a, const auto& b) {
        return a.second < b.second;
      })->first;

  Plan touching = plan;
  touching.mode = Mode::touch;
  touching.in_shared_memory = true;
  const std::uint64_t copied =
      last_of_first(touching, "inplace=" + never, "inplace=0", doubling(512, 64 * kKiB));
  return fmt::format("LOCKSTEP_TUNE=inline={},{},inplace={}",
                     std::clamp(in_flags, kFirstLine, kAllLines), best, copied + 1);
}

}  // namespace lockstep::bench
