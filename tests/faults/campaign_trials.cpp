#include "faults/campaign_trials.hpp"

#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <iterator>
#include <random>
#include <sstream>

#include "faults/memory_group.hpp"
#include "support/namespaces.hpp"

namespace lockstep::test {
namespace {

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
    if (missing_namespaces().empty()) {
      all.push_back({"machines", "hierarchical", FAULTY_RANK_GLOO});
    }
  }
  return all;
}

/// Whether the trial's name has all of LOCKSTEP_FAULT_ONLY's words.
bool is_wanted(const Trial& trial) {
  const char* const only = std::getenv("LOCKSTEP_FAULT_ONLY");
  const std::string name = " " + trial.name() + " ";
  std::istringstream words(only == nullptr ? "" : only);
  for (std::string word; words >> word;) {
    // "memory" stands for "memory-7" too.
    if (name.find(fmt::format(" {} ", word)) == std::string::npos &&
        name.find(fmt::format(" {}-", word)) == std::string::npos) {
      return false;
    }
  }
  return true;
}

/// Operations of all families: those that the hierarchical engine begins inside a host and those
/// that it begins between all ranks.
constexpr const char* kOperations[] = {"barrier",    "all_reduce", "reduce",  "broadcast",
                                       "all_gather", "gather",     "scatter", "reduce_scatter",
                                       "all_to_all", "split",      "allocate"};

/// What a rank of this engine has to bear with.
std::vector<const char*> loads_of(const Engine& engine) {
  if (engine.name == "threads") return {};
  if (engine.is_launched_by_mpi) return {"fork-exit", "fork-call", "no-pidfd", "signals"};
  std::vector<const char*> loads = {"fork-exit", "fork-call",     "no-pidfd", "descriptors",
                                    "file-size", "address-space", "signals",  "stopped-launcher"};
  if (engine.name != "processes") loads.push_back("garbage");
  return loads;
}

/// On hosts of two ranks each, or on one.
int choose_n_ranks(const Engine& engine, std::mt19937& random) {
  return engine.backend == "hierarchical" ? 2 * std::uniform_int_distribution(2, 3)(random)
                                          : std::uniform_int_distribution(2, 4)(random);
}

void add_loads(const Engine& engine, std::mt19937& random, std::vector<Trial>& round) {
  constexpr const char* kFaults[] = {"kill", "stop", "exit", "exception", "op", "missing", "slow"};
  constexpr const char* kPlaces[] = {"before", "between", "in"};
  const auto any_of = [&random](const auto& all) {
    return all[std::uniform_int_distribution<std::size_t>(0, std::size(all) - 1)(random)];
  };
  for (const char* load : loads_of(engine)) {
    const int n_ranks = choose_n_ranks(engine, random);
    const int victim = std::uniform_int_distribution(0, n_ranks - 1)(random);
    round.push_back({engine, any_of(kFaults), any_of(kPlaces), n_ranks, victim, load});
  }
}

/// Whether a process of this machine may trace another, as the one that counts a rank's steps does.
bool can_trace() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == 0 ? 0 : 1);
  int status = -1;
  return ::waitpid(child, &status, 0) == child && status == 0;
}

/// Faults inside lockstep's own code: a rank ends or stops between two instructions of a call, has
/// no memory at one of its allocations, or fails while it joins.
void add_inner_faults(const Engine& engine, std::mt19937& random, std::vector<Trial>& round) {
  const auto any_up_to = [&random](int last) {
    return std::uniform_int_distribution(1, last)(random);
  };
  const auto add = [&](const std::string& fault, const std::string& place) {
    const int n_ranks = choose_n_ranks(engine, random);
    round.push_back({engine, fault, place, n_ranks, any_up_to(n_ranks) - 1});
  };
  for (const char* place : {"before", "between"}) {
    add(fmt::format("memory-{}", any_up_to(60)), place);
  }
  if (engine.name == "threads") return;
  static const bool has_steps = can_trace();
  for (const char* fault : {"kill", "stop"}) {
    if (has_steps) add(fault, fmt::format("step-{}", any_up_to(3000)));
  }
  add("join", "before");
}

/// Faults that not every engine can have.
void add_limits(const Engine& engine, std::mt19937& random, std::vector<Trial>& round) {
  static const bool has_memory_groups{MemoryGroup(std::size_t{1} << 30U)};
  for (const char* place : {"before", "between"}) {
    const int victim = std::uniform_int_distribution(0, 2)(random);
    if (engine.name != "threads" && engine.backend != "hierarchical") {
      round.push_back({engine, "limit", place, 3, victim});
    }
    if ((engine.name == "processes" || engine.name == "gloo") && has_memory_groups) {
      round.push_back({engine, "container", place, 3, victim});
    }
  }
}

}  // namespace

std::vector<Trial> choose_runs(int n_runs, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Trial> runs;
  int n_empty_rounds = 0;
  while (static_cast<int>(runs.size()) < n_runs) {
    std::vector<Trial> round;
    for (const Engine& engine : engines()) {
      if (engine.is_between_machines()) {  // one at a time: they take long
        for (const char* place : {"before", "between", "in"}) {
          const int victim = std::uniform_int_distribution(0, 3)(random);
          round.push_back({engine, "cut", place, 4, victim});
        }
        continue;
      }
      add_loads(engine, random, round);
      add_limits(engine, random, round);
      add_inner_faults(engine, random, round);
      for (const char* fault : {"kill", "stop", "exit", "exception", "op", "count", "type", "root",
                                "missing", "slow", "refuse", "alike"}) {
        const std::string name = fault;
        // A thread cannot be killed or stopped alone.
        if (engine.name == "threads" && (name == "kill" || name == "stop")) continue;
        for (const char* place : {"before", "between", "in"}) {
          const int n_ranks = choose_n_ranks(engine, random);
          const int victim = std::uniform_int_distribution(0, n_ranks - 1)(random);
          round.push_back({engine, fault, place, n_ranks, victim});
          if (engine.backend == "hierarchical") {  // the other rank of its host
            round.push_back({engine, fault, place, n_ranks, victim ^ 1});
          }
        }
      }
      for (const char* wrong : kOperations) {
        const char* right = wrong;
        while (right == wrong) {
          right = kOperations[std::uniform_int_distribution<std::size_t>(
              0, std::size(kOperations) - 1)(random)];
        }
        const int n_ranks = choose_n_ranks(engine, random);
        const int victim = std::uniform_int_distribution(0, n_ranks - 1)(random);
        const char* place = std::uniform_int_distribution(0, 1)(random) == 0 ? "before" : "between";
        round.push_back({engine, fmt::format("{}:{}", wrong, right), place, n_ranks, victim});
      }
    }
    std::erase_if(round, [](const Trial& trial) { return !is_wanted(trial); });
    if (round.empty()) {  // the next may have the load that is wanted
      if (++n_empty_rounds > 300) return {};
      continue;
    }
    std::shuffle(round.begin(), round.end(), random);
    runs.insert(runs.end(), round.begin(), round.end());
  }
  runs.resize(static_cast<std::size_t>(n_runs));
  return runs;
}

std::vector<Trial> choose_trainings(int n_runs, unsigned seed) {
  std::vector<Engine> engines;
  if (LOCKSTEP_TRAIN[0] != '\0') {
    for (const char* backend : {"shared", "gloo", "hierarchical"}) {
      if (std::string(backend) == "hierarchical" && !is_root()) continue;
      engines.push_back({fmt::format("training-{}", backend), backend, LOCKSTEP_TRAIN});
    }
  }
  std::mt19937 random(seed);
  std::vector<Trial> runs;
  const int n_kinds = 2 * static_cast<int>(engines.size());
  for (int i = 0; i < std::max(n_kinds, n_kinds == 0 ? 0 : n_runs); ++i) {
    const Engine& engine = engines[static_cast<std::size_t>(i / 2) % engines.size()];
    const int n_ranks =
        engine.backend == "hierarchical" ? 4 : std::uniform_int_distribution(2, 3)(random);
    const int victim = std::uniform_int_distribution(0, n_ranks - 1)(random);
    const std::string place = fmt::format("after-{}", std::uniform_int_distribution(1, 40)(random));
    const bool is_kill = i % 2 == 0;
    // A limit has to outlast init_dist too.
    const int timeout_s = is_kill ? 60 : engine.backend == "shared" ? 2 : 6;
    const Trial trial{engine, is_kill ? "kill" : "stop", place, n_ranks, victim, {}, timeout_s};
    if (is_wanted(trial)) runs.push_back(trial);
  }
  return runs;
}

}  // namespace lockstep::test
