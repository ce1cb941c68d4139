// Random faults in real jobs over every engine: each survivor ends with the right error, which
// names the right rank, and nothing is left behind.
//
// LOCKSTEP_FAULT_RUNS=500 for the long form, LOCKSTEP_FAULT_SEED for another choice,
// LOCKSTEP_FAULT_ONLY="hierarchical stop" for those whose name has these words.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cli/command.hpp"

namespace lockstep::test {
namespace {

/// As faulty_rank's deadline.
constexpr double kDeadlineSeconds = 2.0;

struct Engine {
  std::string name;
  std::string backend;
  std::string program;
  bool is_launched_by_mpi = false;
};

struct Trial {
  Engine engine;
  std::string fault;
  std::string place;
  int n_ranks;
  int victim;

  std::string name() const {
    return fmt::format("{} {} {} rank {} of {}", engine.name, fault, place, victim, n_ranks);
  }
  bool is_any(std::initializer_list<const char*> faults) const {
    return std::find(faults.begin(), faults.end(), fault) != faults.end();
  }
  bool is_hierarchical() const { return engine.backend == "hierarchical"; }
  /// The victim's operation, where that is another than the others'.
  std::string wrong_operation() const {
    const std::size_t colon = fault.find(':');
    return colon == std::string::npos ? "" : fault.substr(0, colon);
  }
};

struct Report {
  std::string error;
  long long at_ns = 0;
  std::string text;
};

struct Outcome {
  std::string complaint;  ///< empty: all was right
  double latency_s = 0;   ///< from the fault (of late ranks: from the deadline) to the last report
  bool was_aborted = false;
};

int setting(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

bool is_root() { return ::geteuid() == 0; }

std::vector<Engine> engines() {
  std::vector<Engine> all = {{"threads", "shared", FAULTY_RANK},
                             {"processes", "shared", FAULTY_RANK}};
  if (OPENMPI_MODULE[0] != '\0') {
    all.push_back({"openmpi", "mpi", FAULTY_RANK, true});
    // Another boot_id in a mount namespace of its own makes another host.
    if (is_root()) all.push_back({"hierarchical", "hierarchical", FAULTY_RANK, true});
  }
  if (MPICH_MODULE[0] != '\0') all.push_back({"mpich", "mpi", FAULTY_RANK, true});
  if (FAULTY_RANK_GLOO[0] != '\0') {
    all.push_back({"gloo", "gloo", FAULTY_RANK_GLOO});
    if (is_root()) all.push_back({"gloo-hosts", "hierarchical", FAULTY_RANK_GLOO});
  }
  return all;
}

/// Whether the trial's name has all of LOCKSTEP_FAULT_ONLY's words.
bool is_wanted(const Trial& trial) {
  const char* const only = std::getenv("LOCKSTEP_FAULT_ONLY");
  const std::string name = " " + trial.name();
  std::istringstream words(only == nullptr ? "" : only);
  for (std::string word; words >> word;) {
    if (name.find(fmt::format(" {} ", word)) == std::string::npos) return false;
  }
  return true;
}

/// Operations of all families: those that the hierarchical engine begins inside a host and those
/// that it begins between all ranks.
constexpr const char* kOperations[] = {"barrier",    "all_reduce", "reduce",  "broadcast",
                                       "all_gather", "gather",     "scatter", "reduce_scatter",
                                       "all_to_all", "split",      "allocate"};

/// Every fault at every place on every engine, in random order; again when more are wanted. Where
/// ranks are on several hosts, once in a host's leader and once in another.
std::vector<Trial> choose_runs(int n_runs, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Trial> runs;
  while (static_cast<int>(runs.size()) < n_runs) {
    std::vector<Trial> round;
    for (const Engine& engine : engines()) {
      for (const char* fault : {"kill", "stop", "exit", "exception", "op", "count", "type", "root",
                                "missing", "slow"}) {
        const std::string name = fault;
        // A thread cannot be killed or stopped alone.
        if (engine.name == "threads" && (name == "kill" || name == "stop")) continue;
        for (const char* place : {"before", "between", "in"}) {
          const bool is_on_hosts = engine.backend == "hierarchical";
          const int n_ranks = is_on_hosts ? 4 : std::uniform_int_distribution(2, 4)(random);
          const int victim = std::uniform_int_distribution(0, n_ranks - 1)(random);
          round.push_back({engine, fault, place, n_ranks, victim});
          if (is_on_hosts) round.push_back({engine, fault, place, n_ranks, victim ^ 1});
        }
      }
      for (const char* wrong : kOperations) {
        const char* right = wrong;
        while (right == wrong) {
          right = kOperations[std::uniform_int_distribution<std::size_t>(
              0, std::size(kOperations) - 1)(random)];
        }
        const int n_ranks =
            engine.backend == "hierarchical" ? 4 : std::uniform_int_distribution(2, 4)(random);
        const int victim = std::uniform_int_distribution(0, n_ranks - 1)(random);
        const char* place = std::uniform_int_distribution(0, 1)(random) == 0 ? "before" : "between";
        round.push_back({engine, fmt::format("{}:{}", wrong, right), place, n_ranks, victim});
      }
    }
    std::erase_if(round, [](const Trial& trial) { return !is_wanted(trial); });
    if (round.empty()) return {};
    std::shuffle(round.begin(), round.end(), random);
    runs.insert(runs.end(), round.begin(), round.end());
  }
  runs.resize(static_cast<std::size_t>(n_runs));
  return runs;
}

StartOptions start_options(const Trial& trial, const std::string& folder) {
  const std::string program =
      fmt::format("{} {} {} {} {} {}", trial.engine.program, trial.engine.backend, trial.fault,
                  trial.place, trial.victim, folder);
  StartOptions start;
  // The libraries' own leaks would fail a sanitized rank.
  start.variables = {{"ASAN_OPTIONS", "detect_leaks=0"}, {"OMP_NUM_THREADS", "1"}};
  if (trial.engine.name == "threads") {
    start.shell = fmt::format("exec {} {}", program, trial.n_ranks);
    return start;
  }
  const std::string rank = trial.engine.is_launched_by_mpi ? "OMPI_COMM_WORLD_RANK" : "RANK";
  const std::string host =
      trial.is_hierarchical()
          ? fmt::format(
                "sh -c 'echo $((${2} / 2))0000000-0000-4000-8000-000000000000 > "
                "{0}/boot.${2}; exec unshare -m sh -c \"mount --bind {0}/boot.${2} "
                "/proc/sys/kernel/random/boot_id && exec {1}\"'",
                folder, program, rank)
          : program;
  if (!trial.engine.is_launched_by_mpi) {
    start.shell = fmt::format("exec \"$1\" run -n {} {}", trial.n_ranks, host);
    return start;
  }
  const bool is_open = trial.engine.name != "mpich";
  start.variables["LOCKSTEP_MPI"] = is_open ? OPENMPI_MODULE : MPICH_MODULE;
  const std::string flags =
      is_open ? "--allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1"
              : "";
  start.shell = fmt::format("exec mpirun.{} {} -n {} {}", is_open ? "openmpi" : "mpich", flags,
                            trial.n_ranks, host);
  return start;
}

std::optional<Report> read_report(const std::string& path) {
  const std::string text = contents_of(path);
  const std::size_t first = text.find('\n');
  if (first == std::string::npos) return std::nullopt;
  const std::size_t second = text.find('\n', first + 1);
  return Report{text.substr(0, first), std::atoll(text.c_str() + first + 1),
                text.substr(second + 1)};
}

/// A hierarchical group's levels number its ranks anew, and say so: what the innermost level says,
/// and which ranks of the group it numbers.
struct Words {
  std::string text;
  std::vector<int> ranks;
};

Words innermost(const Trial& trial, const std::string& text) {
  Words words{text, {}};
  for (int rank = 0; rank < trial.n_ranks; ++rank) words.ranks.push_back(rank);
  const std::regex level(R"(where ranks? ([0-9, ]+) of the group (is|are) 0 to \d+: )");
  std::smatch match;
  while (std::regex_search(words.text, match, level)) {
    words.ranks.clear();
    std::istringstream numbers(match[1].str());
    for (std::string number; std::getline(numbers, number, ',');) {
      words.ranks.push_back(std::stoi(number));
    }
    words.text = std::string(match.suffix());
  }
  return words;
}

/// Whether the text blames the victim, and nobody else.
bool blames_victim(const Trial& trial, const std::string& text) {
  const Words words = innermost(trial, text);
  std::smatch match;
  const std::regex late(R"(waited [0-9.]+ s for ranks? ([0-9, ]+) of )");
  const std::regex gone(R"(rank (\d+) )");
  const bool is_late = std::regex_search(words.text, match, late);
  if (!is_late && !std::regex_search(words.text, match, gone)) return false;
  std::istringstream numbers(match[1].str());
  std::vector<int> blamed;
  for (std::string number; std::getline(numbers, number, ',');) {
    const auto rank = static_cast<std::size_t>(std::stoi(number));
    if (rank >= words.ranks.size()) return false;
    blamed.push_back(words.ranks[rank]);
  }
  // Engines that pass messages make a large call in steps: a rank that stops in the middle keeps
  // others from theirs, and who waits for those too names them as well.
  const bool is_by_steps = trial.engine.backend != "shared" && trial.place == "in";
  return is_by_steps ? std::find(blamed.begin(), blamed.end(), trial.victim) != blamed.end()
                     : blamed == std::vector{trial.victim};
}

/// The table's row of a rank.
std::string row_of(int rank, const std::string& table) {
  std::smatch match;
  const std::regex row(fmt::format(R"(\n  {}  +([^\n]*))", rank));
  return std::regex_search(table, match, row) ? match[1].str() : "";
}

/// Empty, or what is wrong with the table of a mismatch.
std::string check_table(const Trial& trial, const std::string& text) {
  const bool is_large = trial.place == "in";
  const std::map<std::string, std::string> wrong = {{"op", "broadcast"},
                                                    {"count", is_large ? "262143" : "f64   3 "},
                                                    {"type", "i64"},
                                                    {"root", "  1  "},
                                                    {"missing", "barrier"}};
  const std::string operation = trial.wrong_operation();
  const std::string fragment = operation.empty() ? wrong.at(trial.fault) : operation + " ";
  const Words words = innermost(trial, text);
  const auto at = std::find(words.ranks.begin(), words.ranks.end(), trial.victim);
  const int shown = static_cast<int>(at - words.ranks.begin());
  const std::string row = row_of(shown, words.text);
  if (row.find(fragment) == std::string::npos) {
    return fmt::format("row of rank {} lacks '{}': '{}'", shown, fragment, row);
  }
  if (row.find("faulty_rank.cpp:") == std::string::npos) return "no source line in the table";
  return {};
}

/// Empty, or what is wrong with what `rank` got.
std::string check(const Trial& trial, int rank, const Report& report) {
  const auto is = [&](const char* error) { return report.error == error; };
  const std::string got = fmt::format("rank {} got {}: {}", rank, report.error, report.text);
  if (trial.is_any({"op", "count", "type", "root", "missing"}) ||
      !trial.wrong_operation().empty()) {
    if (!is("MismatchError")) return got;
    const std::string complaint = check_table(trial, report.text);
    return complaint.empty() ? "" : complaint + "; " + got;
  }
  if (!blames_victim(trial, report.text)) return "names another: " + got;
  if (trial.is_any({"stop", "slow"})) return is("TimeoutError") ? "" : got;
  if (trial.fault == "exception") {
    const bool has_text = report.text.find("no more sheets") != std::string::npos;
    return (is("PeerFailed") && has_text) || is("PeerLost") ? "" : got;
  }
  return is("PeerLost") ? "" : got;
}

Outcome judge(const Trial& trial, const std::string& folder, const Ended& ended) {
  Outcome outcome;
  const long long fault_ns = std::atoll(contents_of(folder + "/fault").c_str());
  if (fault_ns == 0) return {.complaint = "the fault never came: " + ended.out + ended.err};
  const bool is_death = trial.is_any({"kill", "exit", "exception"});
  for (int rank = 0; rank < trial.n_ranks; ++rank) {
    if (rank == trial.victim && (is_death || trial.fault == "stop")) continue;
    const auto report = read_report(fmt::format("{}/{}", folder, rank));
    if (!report) {
      // mpirun ends the whole job when a process dies: docs/mpi.md.
      if (trial.engine.is_launched_by_mpi && is_death) {
        outcome.was_aborted = true;
        continue;
      }
      return {.complaint = fmt::format("rank {} says nothing: {}{}", rank, ended.out, ended.err)};
    }
    const std::string complaint = check(trial, rank, *report);
    if (!complaint.empty()) return {.complaint = complaint};
    const double latency = static_cast<double>(report->at_ns - fault_ns) * 1e-9 -
                           (trial.is_any({"stop", "slow"}) ? kDeadlineSeconds : 0);
    outcome.latency_s = std::max(outcome.latency_s, latency);
  }
  return outcome;
}

TEST(FaultCampaignTest, every_survivor_gets_the_right_error_with_the_right_rank) {
  const int n_runs = setting("LOCKSTEP_FAULT_RUNS", 60);
  const int seed = setting("LOCKSTEP_FAULT_SEED", 7);
  const std::vector<Trial> runs = choose_runs(n_runs, static_cast<unsigned>(seed));
  ASSERT_FALSE(runs.empty()) << "LOCKSTEP_FAULT_ONLY leaves nothing";

  std::mutex mutex;  // of everything below, and of starting a process
  struct Latency {
    double seconds;
    std::string trial;
  };
  std::map<std::string, std::vector<Latency>> latencies;
  std::map<std::string, int> n_aborted;
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < runs.size(); i = next++) {
      const Trial& trial = runs[i];
      std::optional<TemporaryFolder> folder;
      std::optional<Command> command;
      {
        const std::lock_guard lock(mutex);
        folder.emplace();
        command.emplace(start_options(trial, *folder / "."));
      }
      const Ended ended = command->wait();
      const Outcome outcome = judge(trial, *folder / ".", ended);
      const std::lock_guard lock(mutex);
      EXPECT_EQ(outcome.complaint, "") << "seed " << seed << ", run " << i << ": " << trial.name();
      if (outcome.was_aborted) {
        ++n_aborted[trial.engine.name];
      } else {
        latencies[trial.engine.name].push_back({outcome.latency_s, trial.name()});
      }
      command->expect_nothing_left();
    }
  };
  std::vector<std::thread> workers;
  for (int i = 0; i < 4; ++i) workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();

  // Reported, not asserted: the machine may be busy.
  for (auto& [engine, all] : latencies) {
    std::ranges::sort(all, {}, &Latency::seconds);
    fmt::print(
        "{}: {} runs, from fault or deadline to the last survivor's error: median {:.0f} ms, "
        "longest {:.0f} ms ({}); ended by mpirun: {}\n",
        engine, all.size(), all[all.size() / 2].seconds * 1e3, all.back().seconds * 1e3,
        all.back().trial, n_aborted[engine]);
  }
}

}  // namespace
}  // namespace lockstep::test
