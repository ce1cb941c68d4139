#include <algorithm>
#include <cmath>
#include <map>

#include "cli/bench/bench.hpp"

namespace lockstep::bench {
namespace {

constexpr std::chrono::milliseconds kProbe{20};
constexpr int kMostRounds = 4;
constexpr std::uint64_t kMostFreshBytes = std::uint64_t{1} << 30;

double quantile(std::vector<double> values, double q) {
  const auto at = static_cast<std::ptrdiff_t>(q * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<std::size_t>(at)];
}

bool is_in_place(Operation operation) {
  return operation == Operation::all_reduce || operation == Operation::broadcast;
}

/// A block for one kind of call, without its lengths.
Block block_of(const Plan& plan, Operation operation, std::uint64_t n_bytes) {
  const std::uint64_t n = n_bytes / size_of(plan.type);
  const auto ranks = static_cast<std::uint64_t>(plan.n_ranks);
  Block block{};
  block.operation = operation;
  block.type = plan.type;
  block.mode = operation == Operation::barrier ? Mode::warm : plan.mode;
  block.in_shared_memory = plan.in_shared_memory ? 1 : 0;
  block.count = operation == Operation::barrier
                    ? 0
                    : (is_in_place(operation) ? n : std::max<std::uint64_t>(n / ranks, 1));
  return block;
}

/// Bytes on the wire per byte of the buffer, as defined by nccl-tests.
double bus_factor(Operation operation, int n_ranks) {
  const double n = n_ranks;
  switch (operation) {
    case Operation::barrier: return 0;
    case Operation::all_reduce: return 2 * (n - 1) / n;
    case Operation::broadcast: return 1;
    case Operation::all_gather:
    case Operation::reduce_scatter:
    case Operation::all_to_all: return (n - 1) / n;
  }
  return 0;
}

/// Sets the number of calls so that a block takes about plan.block_time and the clock little.
void set_lengths(const Plan& plan, std::uint64_t n_bytes, double ns_per_call, Block& block) {
  constexpr double kClockWorth = 2'000;
  block.calls_per_sample =
      block.mode == Mode::warm
          ? static_cast<std::uint32_t>(std::clamp(std::ceil(kClockWorth / ns_per_call), 1.0, 100.0))
          : 1;
  const double block_ns = static_cast<double>(std::chrono::nanoseconds(plan.block_time).count());
  double most = 20'000;
  if (block.mode == Mode::fresh) {
    const auto pair = static_cast<double>(std::max<std::uint64_t>(n_bytes, 64)) * 2;
    most = std::max(3.0, static_cast<double>(kMostFreshBytes) / pair);
  }
  block.n_samples = static_cast<std::uint32_t>(
      std::clamp(block_ns / (ns_per_call * block.calls_per_sample), 5.0, most));
}

struct Sample {
  Placement placement;
  double p50;
  double p99;
};

struct Track {
  Team* team;
  Block block;
  std::vector<Sample> samples = {};
  int n_moved = 0;
  std::string error = {};
};

/// The placement of most samples.
Placement commonest(const std::vector<Track>& tracks) {
  std::map<Placement, int> counts;
  for (const Track& track : tracks) {
    for (const Sample& sample : track.samples) ++counts[sample.placement];
  }
  Placement best = Placement::near;
  int most = -1;
  for (const auto& [placement, n] : counts) {
    if (n > most) most = n, best = placement;
  }
  return best;
}

bool all_count(const std::vector<Track>& tracks) {
  const Placement placement = commonest(tracks);
  return std::all_of(tracks.begin(), tracks.end(), [&](const Track& track) {
    return !track.error.empty() ||
           std::any_of(track.samples.begin(), track.samples.end(),
                       [&](const Sample& sample) { return sample.placement == placement; });
  });
}

Row row_of(const Plan& plan, Operation operation, std::uint64_t n_bytes, const Track& track,
           Placement placement) {
  Row row{.operation = operation,
          .n_bytes = n_bytes,
          .entrant = track.team->entrant().name,
          .family = track.team->entrant().family,
          .placement = placement,
          .n_moved = track.n_moved,
          .error = track.error};
  std::map<Placement, std::vector<Sample>> samples;
  for (const Sample& sample : track.samples) samples[sample.placement].push_back(sample);
  for (const auto& [where, taken] : samples) {
    std::vector<double> p50;
    std::vector<double> p99;
    for (const Sample& sample : taken) {
      p50.push_back(sample.p50);
      p99.push_back(sample.p99);
    }
    row.by_placement[where] = {.n_blocks = static_cast<int>(taken.size()),
                               .p50_us = quantile(p50, 0.5) / 1e3,
                               .p99_us = quantile(p99, 0.5) / 1e3};
  }
  if (const auto found = row.by_placement.find(placement); found != row.by_placement.end()) {
    row.figures = found->second;
    row.algorithm_gb_s = static_cast<double>(n_bytes) / row.figures.p50_us / 1e3;
    row.bus_gb_s = row.algorithm_gb_s * bus_factor(operation, plan.n_ranks);
  } else if (row.error.empty()) {
    row.error = "the machine moved during every block";
  }
  return row;
}

void run_block(const Plan& plan, Track& track) {
  const bool probes = plan.cores.size() >= 2;
  const auto probe = [&] {
    return probe_placement(plan.cores[0], plan.cores[1], kProbe).placement;
  };
  const Placement before = probes ? probe() : Placement::near;
  const std::vector<double> times = track.team->run(track.block);
  const Placement after = probes ? probe() : Placement::near;
  if (before == after) {
    track.samples.push_back({after, quantile(times, 0.5), quantile(times, 0.99)});
  } else {
    ++track.n_moved;  // belongs to neither
  }
}

}  // namespace

std::vector<Row> measure_all(const Plan& plan, std::vector<std::unique_ptr<Team>>& teams,
                             const std::function<void(Operation, std::uint64_t)>& progress) {
  std::vector<Row> rows;
  for (const Operation operation : plan.operations) {
    for (const std::uint64_t n_bytes : plan.sizes) {
      std::vector<Track> tracks;
      for (auto& team : teams) {
        if (!team) continue;
        Track track{.team = team.get(), .block = block_of(plan, operation, n_bytes)};
        try {
          // The first block warms up, the second measures the length of a call.
          track.block.n_samples = 3;
          track.block.calls_per_sample = 1;
          track.team->run(track.block);
          set_lengths(plan, n_bytes, quantile(track.team->run(track.block), 0.5), track.block);
        } catch (const std::exception& error) {
          track.error = error.what();
        }
        tracks.push_back(std::move(track));
      }
      // If the placement keeps changing, run more rounds so that each team has valid blocks.
      for (int i = 0; i < plan.n_blocks * kMostRounds; ++i) {
        if (i >= plan.n_blocks && all_count(tracks)) break;
        for (Track& track : tracks) {
          if (!track.error.empty()) continue;
          try {
            run_block(plan, track);
          } catch (const std::exception& error) {
            track.error = error.what();
          }
        }
      }
      const Placement placement = commonest(tracks);
      for (const Track& track : tracks) {
        rows.push_back(row_of(plan, operation, n_bytes, track, placement));
        if (track.error.empty()) continue;
        for (auto& team : teams) {
          if (team.get() == track.team) team.reset();  // its ranks have ended
        }
      }
      progress(operation, n_bytes);
      if (operation == Operation::barrier) break;
    }
  }
  return rows;
}

}  // namespace lockstep::bench
