// Random ranks of a training that are killed or stopped at random steps: every other rank names
// the one, whether it waits for a layer's statistics or for gradients. In shared memory, over Gloo,
// and on two hosts with Gloo between them.
//
// LOCKSTEP_FAULT_RUNS=500 makes a fifteenth of that, LOCKSTEP_FAULT_SEED=N others. Each starts a
// training, and half of them wait for a limit: 2 to 8 s.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <regex>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/levels.hpp"
#include "support/waiting.hpp"

namespace train {
namespace {

using lockstep::test::Command;
using lockstep::test::contents_of;
using lockstep::test::wait_until;

int setting(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

struct Trial {
  std::string backend;  ///< shared, gloo, hierarchical
  int signal;           ///< SIGKILL or SIGSTOP
  int n_ranks;
  int victim;
  int step;  ///< when it comes: about then

  std::string name() const {
    return fmt::format("{}: {} of rank {} of {} at step {}", backend,
                       signal == SIGKILL ? "kill" : "stop", victim, n_ranks, step);
  }
};

std::string file_of(const lockstep::test::TemporaryFolder& folder, const char* what, int rank) {
  return folder / fmt::format("{}-{}", what, rank);
}

Command start(const Trial& trial, int timeout, const lockstep::test::TemporaryFolder& folder) {
  const std::string training = fmt::format(
      "exec {1} --backend {3} --data {2} --batch 12 --epochs 1000 --threads 1 --metrics-every 1 "
      "--metrics {0}/metrics 2> {0}/error-$RANK",
      folder.path(), LOCKSTEP_TRAIN, LOCKSTEP_DIGITS, trial.backend);
  // Another boot_id in a mount namespace of its own makes another host, of two ranks.
  const std::string on_host =
      trial.backend != "hierarchical"
          ? training
          : fmt::format(
                "echo $((RANK / 2))0000000-0000-4000-8000-000000000000 > {0}/boot-$RANK; "
                "exec unshare -m sh -c 'mount --bind {0}/boot-$RANK "
                "/proc/sys/kernel/random/boot_id && {1}'",
                folder.path(), training);
  const std::string rank =
      fmt::format("trap \"\" TERM; echo $$ > {0}/pid-$RANK~; mv {0}/pid-$RANK~ {0}/pid-$RANK; {1}",
                  folder.path(), on_host);
  return Command(
      {.arguments = lockstep::test::script({"run", "-n", std::to_string(trial.n_ranks)}, rank),
       .variables = {{"LOCKSTEP_TIMEOUT", std::to_string(timeout)}, {"OMP_NUM_THREADS", "1"}}});
}

/// Whether the text says that the victim has gone or is waited for, in the words of the errors.
bool names_victim(const Trial& trial, const std::string& text) {
  const auto words = lockstep::test::innermost_level(text, trial.n_ranks);
  const auto at = std::find(words.ranks.begin(), words.ranks.end(), trial.victim);
  const auto shown = at - words.ranks.begin();
  const std::string killed = R"(rank {} [^\n]*was killed by signal 9)";
  const std::map<std::string, std::string> lost = {
      {"shared", killed},
      {"gloo", "rank {} is gone: "},
      {"hierarchical", R"(rank {0} (is gone: |died \(|[^\n]*was killed by signal 9))"}};
  const std::regex pattern(
      trial.signal == SIGKILL
          ? fmt::format(fmt::runtime(lost.at(trial.backend)), shown)
          : fmt::format(R"(waited [0-9.]+ s for ranks? ([0-9]+, )*{}\b)", shown));
  return std::regex_search(words.text, pattern);
}

/// timeout: of every call, in seconds. False: a rank was late before it was stopped, as happens on
/// a busy machine, so a longer timeout is needed.
bool run(const Trial& trial, int timeout) {
  const lockstep::test::TemporaryFolder folder;
  Command command = start(trial, timeout, folder);
  const auto has_come = [&] {
    const std::string lines = contents_of(folder / "metrics");
    return std::count(lines.begin(), lines.end(), '\n') >= trial.step;
  };
  const auto has_ended = [&] { return lockstep::test::thread_state(command.pid()) == 'Z'; };
  EXPECT_TRUE(wait_until([&] { return has_come() || has_ended(); }, std::chrono::minutes(10)));
  if (!has_come()) {
    std::string errors = command.wait().err;
    for (int rank = 0; rank < trial.n_ranks; ++rank) {
      errors += contents_of(file_of(folder, "error", rank));
    }
    EXPECT_TRUE(std::regex_search(errors, std::regex("waited [0-9.]+ s for rank|did not join")))
        << errors;
    return false;
  }
  const int pid = std::stoi(contents_of(file_of(folder, "pid", trial.victim)));
  EXPECT_EQ(::kill(pid, trial.signal), 0);
  const lockstep::test::Ended ended = command.wait();
  EXPECT_NE(ended.exit_code, 0);
  for (int rank = 0; rank < trial.n_ranks; ++rank) {
    if (rank == trial.victim) continue;
    const std::string text = contents_of(file_of(folder, "error", rank));
    EXPECT_TRUE(names_victim(trial, text)) << "rank " << rank << " says: " << text << ended.err;
  }
  command.expect_nothing_left();
  return true;
}

TEST(TrainingCampaignTest, every_other_rank_names_the_one_that_stopped) {
  std::vector<std::string> backends = {"shared", "gloo"};
  if (::geteuid() == 0) backends.emplace_back("hierarchical");
  const int n_backends = static_cast<int>(backends.size());
  const int n_runs = std::max(2 * n_backends, setting("LOCKSTEP_FAULT_RUNS", 60) / 15);
  const int seed = setting("LOCKSTEP_FAULT_SEED", 7);
  std::mt19937 random(static_cast<unsigned>(seed));
  for (int i = 0; i < n_runs; ++i) {
    const std::string& backend = backends[static_cast<std::size_t>(i / 2 % n_backends)];
    const int n_ranks = backend == "hierarchical" ? 4 : std::uniform_int_distribution(2, 3)(random);
    const Trial trial{backend, i % 2 == 0 ? SIGKILL : SIGSTOP, n_ranks,
                      std::uniform_int_distribution(0, n_ranks - 1)(random),
                      std::uniform_int_distribution(1, 40)(random)};
    SCOPED_TRACE(fmt::format("seed {}, run {}: {}", seed, i, trial.name()));
    int timeout = trial.signal == SIGKILL ? 60 : 2;
    if (timeout == 2 && trial.backend != "shared") timeout = 6;  // of init_dist too
    while (!run(trial, timeout) && !HasFailure()) timeout *= 2;
  }
}

}  // namespace
}  // namespace train
