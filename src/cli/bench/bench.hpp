#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.hpp"
#include "cli/bench/schedule.hpp"
#include "cli/bench/wire.hpp"

namespace lockstep::bench {

std::string_view name_of(Operation operation);
std::string_view name_of(Type type);
std::string_view name_of(Mode mode);

std::string_view name_of(Placement placement);

struct Probe {
  double one_way_ns;  ///< of a cache line from one core to the other
  Placement placement;
};

/// Ping-pong between the two cores for `duration`.
Probe probe_placement(int core_a, int core_b, std::chrono::milliseconds duration);

/// CPU time that all programs have used of these cores, and that the host has withheld from them.
/// In steps of 10 ms.
std::chrono::nanoseconds used_cpu_time(const std::vector<int>& cores);

/// A library or configuration to measure.
struct Entrant {
  std::string name;
  std::string family;                ///< name for --peer; "lockstep" for ours
  std::vector<std::string> command;  ///< the socket's name is appended
};

/// Entrants for n ranks. Those whose program is not on this machine are omitted, with the reason in
/// in `missing`.
std::vector<Entrant> ours(int n_ranks, bool with_processes, bool with_threads);
std::vector<Entrant> peers(const std::vector<std::string>& families, int n_ranks,
                           std::vector<std::string>& missing);

/// The ranks of one entrant, running and connected.
class Team {
 public:
  /// cores: rank r runs on cores[r % size]; empty: anywhere. If it does not start, throws
  /// SystemError or EngineError with the program's output.
  Team(const Entrant& entrant, int n_ranks, const std::vector<int>& cores);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  const Entrant& entrant() const { return entrant_; }
  /// Times of every rank, in ns per call. Throws EngineError with the rank's error text.
  std::vector<double> run(const Block& block);
  /// That its ranks have used.
  std::chrono::nanoseconds cpu_time() const;

 private:
  [[noreturn]] void fail(const std::string& what);
  void end() noexcept;

  Entrant entrant_;
  base::UniqueFd output_;  ///< output of the ranks
  base::UniqueFd listener_;
  int pid_ = -1;
  std::vector<base::UniqueFd> ranks_;
  std::set<clockid_t> clocks_;  ///< CPU time of the ranks' processes
};

struct Plan {
  int n_ranks = 2;
  std::vector<Operation> operations;
  std::vector<std::uint64_t> sizes;  ///< bytes, counted as in nccl-tests
  Type type = Type::f32;
  Mode mode = Mode::warm;
  bool in_shared_memory = false;
  int n_blocks = 5;  ///< of each contestant in each placement that occurs
  std::chrono::milliseconds block_time{25};
  std::vector<int> cores;
};

/// One block of a contestant.
struct Sample {
  double p50_us;
  double p99_us;
  double one_way_ns;  ///< mean of the probes before and after it; 0 without probes
  /// Share of the cores' time that went to other programs or to the host, give or take a clock tick
  /// of 10 ms; 0 if ranks are not bound.
  double foreign;
};

/// Medians over the blocks of one placement.
struct Figures {
  double p50_us = 0;
  double p99_us = 0;
  std::vector<Sample> blocks = {};
};

/// One entrant at one size.
struct Row {
  Operation operation;
  std::uint64_t n_bytes;
  std::string entrant;
  std::string family;
  Placement placement;  ///< of most blocks of all entrants
  double p50_us = 0;    ///< in that placement; 0: no block
  double p99_us = 0;
  double algorithm_gb_s = 0;
  double bus_gb_s = 0;
  std::map<Placement, Figures> by_placement = {};
  int n_moved = 0;         ///< blocks whose placement changed during the block
  std::string error = {};  ///< why there are no figures
};

/// Measures every size of every operation, alternating between teams block by block. A team that
/// fails is ended. `progress` is called after each size.
std::vector<Row> measure_all(const Plan& plan, std::vector<std::unique_ptr<Team>>& teams,
                             const std::function<void(Operation, std::uint64_t)>& progress);

/// Measures the best thresholds of the shared engine for such ranks on this machine. Returns a
/// value of LOCKSTEP_TUNE, with its name. Takes about a minute. Throws what Team and its run throw.
std::string tuned(const Plan& plan);

std::string table_of(const Plan& plan, const std::vector<Row>& rows);
nlohmann::json json_of(const Plan& plan, const std::vector<Row>& rows);
/// Plots the latencies with gnuplot. Throws SystemError if it is not installed.
void draw(const Plan& plan, const std::vector<Row>& rows, const std::string& path);

/// One of our ranks: a process, or n threads if n_threads > 0.
int work(const std::string& socket, int n_threads);

}  // namespace lockstep::bench
