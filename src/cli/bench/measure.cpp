#include <time.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <thread>
#include <utility>

#include "cli/bench/bench.hpp"

namespace lockstep::bench {
namespace {

constexpr std::chrono::milliseconds kProbe{10};
/// A size is left after as many rounds as this for each block of a contestant, and returned to
/// once.
constexpr int kMostRounds = 3;
constexpr int kVisits = 2;
/// Or, because on a busy machine blocks take longer, after this many times the time of these
/// blocks.
constexpr int kMostDelay = 3;
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
      std::clamp(block_ns / (ns_per_call * block.calls_per_sample), 3.0, most));
}

/// One contestant at one size.
struct Track {
  std::size_t team;
  Block block;
  std::chrono::duration<double, std::nano> block_time = {};
  std::map<Placement, std::vector<Sample>> samples = {};
  int n_moved = 0;
  std::string error = {};
};

/// One size of one operation.
struct Point {
  Operation operation;
  std::uint64_t n_bytes;
  std::vector<Track> tracks;
  Schedule schedule;
};

/// The placement of most blocks.
Placement commonest(const std::vector<Track>& tracks) {
  std::map<Placement, std::size_t> counts;
  for (const Track& track : tracks) {
    for (const auto& [placement, samples] : track.samples) counts[placement] += samples.size();
  }
  Placement best = Placement::near;
  std::size_t most = 0;
  for (const auto& [placement, n] : counts) {
    if (n > most) most = n, best = placement;
  }
  return best;
}

Figures figures_of(const std::vector<Sample>& blocks) {
  std::vector<double> p50;
  std::vector<double> p99;
  for (const Sample& block : blocks) {
    p50.push_back(block.p50_us);
    p99.push_back(block.p99_us);
  }
  return {.p50_us = quantile(p50, 0.5), .p99_us = quantile(p99, 0.5), .blocks = blocks};
}

Row row_of(const Plan& plan, const Point& point, const Track& track, const Entrant& entrant,
           Placement placement) {
  Row row{.operation = point.operation,
          .n_bytes = point.n_bytes,
          .entrant = entrant.name,
          .family = entrant.family,
          .placement = placement,
          .n_moved = track.n_moved,
          .error = track.error};
  for (const auto& [where, samples] : track.samples) row.by_placement[where] = figures_of(samples);
  if (const auto found = row.by_placement.find(placement); found != row.by_placement.end()) {
    row.p50_us = found->second.p50_us;
    row.p99_us = found->second.p99_us;
    row.algorithm_gb_s = static_cast<double>(point.n_bytes) / row.p50_us / 1e3;
    row.bus_gb_s = row.algorithm_gb_s * bus_factor(point.operation, plan.n_ranks);
  } else if (row.error.empty()) {
    row.error = "the machine moved during every block";
  }
  return row;
}

/// Of a program and its team's ranks, and of everything, from its construction.
class CpuUse {
 public:
  CpuUse(const std::vector<int>& cores, const Team& team)
      : cores_(cores), team_(team), begin_(Clock::now()), all_(used_cpu_time(cores)), own_(own()) {}

  /// The share of the cores' time that went to others. Below 0 by a clock tick at most.
  double foreign() const {
    if (cores_.empty()) return 0;
    const std::chrono::duration<double> others = used_cpu_time(cores_) - all_ - (own() - own_);
    const std::chrono::duration<double> passed = Clock::now() - begin_;
    return others / (passed * static_cast<double>(cores_.size()));
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::chrono::nanoseconds own() const {
    timespec used{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return team_.cpu_time() + std::chrono::seconds(used.tv_sec) +
           std::chrono::nanoseconds(used.tv_nsec);
  }

  const std::vector<int>& cores_;
  const Team& team_;
  Clock::time_point begin_;
  std::chrono::nanoseconds all_;
  std::chrono::nanoseconds own_;
};

class Measurement {
 public:
  Measurement(const Plan& plan, std::vector<std::unique_ptr<Team>>& teams)
      : plan_(plan), teams_(teams), cores_(plan.cores) {
    const auto n_used = static_cast<std::size_t>(std::max(plan.n_ranks, 2));
    if (cores_.size() > n_used) cores_.resize(n_used);
  }

  /// With the lengths of its blocks.
  Point start(Operation operation, std::uint64_t n_bytes) {
    std::vector<Track> tracks;
    std::vector<std::string> families;
    for (std::size_t i = 0; i < teams_.size(); ++i) {
      if (!teams_[i]) continue;
      tracks.push_back({.team = i, .block = block_of(plan_, operation, n_bytes)});
      families.push_back(teams_[i]->entrant().family);
    }
    Point point{operation, n_bytes, std::move(tracks), Schedule(families, plan_.n_blocks)};
    for (std::size_t i = 0; i < point.tracks.size(); ++i) {
      guarded(point, i, [&](Team& team, Block& block) {
        // The first block warms up, the second measures the length of a call.
        block.n_samples = 3;
        block.calls_per_sample = 1;
        team.run(block);
        const double ns_per_call = quantile(team.run(block), 0.5);
        set_lengths(plan_, n_bytes, ns_per_call, block);
        point.tracks[i].block_time = std::chrono::duration<double, std::nano>(ns_per_call) *
                                     block.n_samples * block.calls_per_sample;
      });
    }
    return point;
  }

  /// Takes blocks until there are enough, within a bound.
  void visit(Point& point) {
    for (std::size_t i = 0; i < point.tracks.size(); ++i) {
      if (!teams_[point.tracks[i].team]) point.schedule.fail(i);  // at another size
    }
    const std::size_t n_contestants = point.tracks.size();
    const int n_rounds = kMostRounds * plan_.n_blocks;
    std::chrono::duration<double, std::nano> round = n_contestants * kProbe;
    for (const Track& track : point.tracks) round += track.block_time;
    const auto begin = std::chrono::steady_clock::now();
    Probe now = probe();
    for (std::size_t turn = 0; turn < n_contestants * static_cast<std::size_t>(n_rounds); ++turn) {
      const bool is_late = std::chrono::steady_clock::now() - begin > round * n_rounds * kMostDelay;
      if (is_late && turn >= n_contestants) return;
      found_.add(now.placement);
      if (point.schedule.is_done(found_)) return;
      if (const auto next = point.schedule.next(now.placement)) {
        now = run_block(point, *next, now);
      } else {
        std::this_thread::sleep_for(plan_.block_time);
        now = probe();
      }
    }
  }

 private:
  Probe probe() const {
    if (plan_.cores.size() < 2) return {0, Placement::near};
    return probe_placement(plan_.cores[0], plan_.cores[1], kProbe);
  }

  /// Ends the team if the call throws.
  template <class Call>
  void guarded(Point& point, std::size_t i, Call call) {
    Track& track = point.tracks[i];
    try {
      call(*teams_[track.team], track.block);
    } catch (const std::exception& error) {
      track.error = error.what();
      point.schedule.fail(i);
      teams_[track.team].reset();
    }
  }

  /// Returns the probe after it, which is the one before the next block.
  Probe run_block(Point& point, std::size_t i, Probe before) {
    Track& track = point.tracks[i];
    Probe after = before;
    guarded(point, i, [&](Team& team, const Block& block) {
      const CpuUse use(cores_, team);
      const std::vector<double> times = team.run(block);
      after = probe();
      if (before.placement != after.placement) {
        ++track.n_moved;  // belongs to neither
        return;
      }
      const double p50_us = quantile(times, 0.5) / 1e3;
      const double p99_us = quantile(times, 0.99) / 1e3;
      track.samples[after.placement].push_back(
          {.p50_us = p50_us,
           .p99_us = p99_us,
           .one_way_ns = (before.one_way_ns + after.one_way_ns) / 2,
           .foreign = use.foreign()});
      point.schedule.add(i, after.placement, p50_us);
    });
    return after;
  }

  const Plan& plan_;
  std::vector<std::unique_ptr<Team>>& teams_;
  std::vector<int> cores_;  // of the ranks and the probes
  Occurrences found_;
};

}  // namespace

std::vector<Row> measure_all(const Plan& plan, std::vector<std::unique_ptr<Team>>& teams,
                             const std::function<void(Operation, std::uint64_t)>& progress) {
  std::vector<Entrant> entrants;
  for (const auto& team : teams) entrants.push_back(team ? team->entrant() : Entrant{});
  Measurement measurement(plan, teams);
  std::vector<Point> points;
  for (const Operation operation : plan.operations) {
    for (const std::uint64_t n_bytes : plan.sizes) {
      points.push_back(measurement.start(operation, n_bytes));
      measurement.visit(points.back());
      progress(operation, n_bytes);
      if (operation == Operation::barrier) break;
    }
  }
  // A placement that was found later, or too seldom the first time.
  for (int visit = 1; visit < kVisits; ++visit) {
    for (Point& point : points) {
      measurement.visit(point);
      progress(point.operation, point.n_bytes);
    }
  }
  std::vector<Row> rows;
  for (const Point& point : points) {
    const Placement placement = commonest(point.tracks);
    for (const Track& track : point.tracks) {
      rows.push_back(row_of(plan, point, track, entrants[track.team], placement));
    }
  }
  return rows;
}

}  // namespace lockstep::bench
