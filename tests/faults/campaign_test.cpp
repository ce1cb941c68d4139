// Random faults in real jobs over every engine and in trainings, some under a load that makes the
// ranks' life hard: each survivor ends with the right error, which names the right rank, and
// nothing is left behind.
//
// LOCKSTEP_FAULT_RUNS=500 for the long form, LOCKSTEP_FAULT_SEED for another choice,
// LOCKSTEP_FAULT_ONLY="hierarchical stop" for those whose name has these words: an engine, a fault,
// a place, a load, "load" for those under any.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cli/command.hpp"
#include "faults/campaign_judge.hpp"
#include "faults/campaign_loads.hpp"
#include "faults/campaign_trials.hpp"
#include "faults/memory_group.hpp"
#include "support/namespaces.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {
int setting(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}
/// The command of a rank.
std::string program_of(const Trial& trial, const std::string& folder) {
  if (!trial.engine.trains()) {
    return fmt::format("{} {} {} {} {} {}", trial.engine.program, trial.engine.backend, trial.fault,
                       trial.place, trial.victim, folder);
  }
  const std::string file = folder + "/rank.sh";
  std::ofstream(file) << training_rank(trial, folder);
  return "sh " + file;
}
StartOptions start_options(const Trial& trial, const std::string& folder) {
  const std::string program = program_of(trial, folder);
  StartOptions start;
  // The libraries' own leaks would fail a sanitized rank.
  start.variables = {{"ASAN_OPTIONS", "detect_leaks=0"}, {"OMP_NUM_THREADS", "1"}};
  if (!trial.load.empty()) start.variables["LOCKSTEP_FAULT_LOAD"] = trial.load;
  if (trial.timeout_s != 0) start.variables["LOCKSTEP_TIMEOUT"] = std::to_string(trial.timeout_s);
  if (trial.engine.is_between_machines()) {
    start.arguments = {"run", "--node-rank", "--nnodes", "2",
                       "-n",  "2",           "--rdzv",   Namespaces::address(0) + ":29400"};
    std::istringstream words(program);
    for (std::string word; words >> word;) start.arguments.push_back(word);
    start.shell = fmt::format(
        "command=$1; shift 3; "
        "(set -- \"$command\" run --node-rank 1 \"$@\"; {}) & "
        "(set -- \"$command\" run --node-rank 0 \"$@\"; {}); code=$?; wait; exit $code",
        Namespaces::shell_of(1), Namespaces::shell_of(0));
    return start;
  }
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
/// Names of the files that survivors write.
std::vector<std::string> reports_of(const Trial& trial) {
  std::vector<std::string> names;
  for (int rank = 0; rank < trial.n_ranks; ++rank) {
    if (rank == trial.victim && trial.is_any({"kill", "exit", "exception", "stop"})) continue;
    names.push_back(std::to_string(rank));
  }
  return names;
}

/// Runs one, and what is wrong with it.
class Job {
 public:
  Job(const Trial& trial, Namespaces* machines) : trial_(trial), machines_(machines) {
    StartOptions start = start_options(trial, path());
    if (trial.fault == "container") {
      // Less than one buffer. libtorch needs more than the rest.
      memory_.emplace(std::size_t{trial.engine.backend == "gloo" ? 1024U : 512U} << 20U);
      start.shell = fmt::format("echo $$ > {}/cgroup.procs; {}", memory_->path(), start.shell);
    }
    command_.emplace(start);
  }
  ~Job() {
    command_.reset();  // and all its processes, before their control group
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  Outcome run() {
    do_to_job(trial_.load, *command_, path(), trial_.n_ranks, reports_of(trial_));
    if (trial_.engine.trains()) fail_training(trial_, *command_, path());
    const Ended ended = command_->wait();
    if (machines_ != nullptr) machines_->join_cables();
    return judge(trial_, path(), ended);
  }
  void expect_nothing_left() const { command_->expect_nothing_left(); }

 private:
  std::string path() const { return folder_ / "."; }

  const Trial& trial_;
  Namespaces* machines_;
  TemporaryFolder folder_;
  std::optional<MemoryGroup> memory_;
  std::optional<Command> command_;
};

/// Runs them, `n_jobs` at a time.
void run_trials(const std::vector<Trial>& runs, int seed, int n_jobs) {
  std::mutex machines_mutex;  // a trial between machines has them for itself
  std::optional<Namespaces> machines;
  const bool has_machines = std::ranges::any_of(
      runs, [](const Trial& trial) { return trial.engine.is_between_machines(); });
  if (has_machines) machines.emplace(2);

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
      Trial trial = runs[i];
      const bool is_between_machines = trial.engine.is_between_machines();
      std::unique_lock<std::mutex> alone(machines_mutex, std::defer_lock);
      if (is_between_machines) alone.lock();
      std::optional<Job> job;
      Outcome outcome{.complaint = {}, .was_late = true};
      for (; outcome.was_late; trial.timeout_s *= 2) {
        job.reset();
        {
          const std::lock_guard lock(mutex);
          job.emplace(trial, is_between_machines ? &*machines : nullptr);
        }
        outcome = job->run();
      }
      const std::lock_guard lock(mutex);
      EXPECT_EQ(outcome.complaint, "") << "seed " << seed << ", run " << i << ": " << trial.name();
      if (outcome.was_aborted) {
        ++n_aborted[trial.engine.name];
      } else {
        latencies[trial.engine.name].push_back({outcome.latency_s, trial.name()});
      }
      job->expect_nothing_left();
    }
  };
  std::vector<std::thread> workers;
  for (int i = 0; i < n_jobs; ++i) workers.emplace_back(work);
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

/// A training takes seconds to start, and half of them wait for a limit: a fifteenth of the runs.
std::vector<Trial> trainings(int seed) {
  return choose_trainings(setting("LOCKSTEP_FAULT_RUNS", 60) / 15, static_cast<unsigned>(seed));
}

TEST(FaultCampaignTest, every_survivor_gets_the_right_error_with_the_right_rank) {
  const int seed = setting("LOCKSTEP_FAULT_SEED", 7);
  const std::vector<Trial> runs =
      choose_runs(setting("LOCKSTEP_FAULT_RUNS", 60), static_cast<unsigned>(seed));
  ASSERT_FALSE(runs.empty() && trainings(seed).empty()) << "LOCKSTEP_FAULT_ONLY leaves nothing";
  run_trials(runs, seed, /*n_jobs=*/4);
}

TEST(TrainingCampaignTest, every_other_rank_names_the_one_that_stopped) {
  const int seed = setting("LOCKSTEP_FAULT_SEED", 7);
  const std::vector<Trial> runs = trainings(seed);
  if (runs.empty()) GTEST_SKIP() << "no libtorch, or LOCKSTEP_FAULT_ONLY leaves no training";
  run_trials(runs, seed, /*n_jobs=*/1);
}

}  // namespace
}  // namespace lockstep::test
