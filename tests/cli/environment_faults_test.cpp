#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cli/command.hpp"

namespace lockstep::test {
namespace {

using Values = std::map<std::string, std::string>;

// What one rank of two finds under each launcher. Its peer is never there.
const std::vector<Values> kLaunchers = {
    {{"RANK", "0"},
     {"WORLD_SIZE", "2"},
     {"LOCAL_RANK", "0"},
     {"LOCAL_WORLD_SIZE", "2"},
     {"MASTER_ADDR", "127.0.0.1"},
     {"MASTER_PORT", "29500"},
     {"LOCKSTEP_RESTART", "0"},
     {"LOCKSTEP_SEGMENT", "3:0123456789abcdef"}},
    {{"RANK", "1"},
     {"WORLD_SIZE", "2"},
     {"LOCAL_RANK", "1"},
     {"LOCAL_WORLD_SIZE", "2"},
     {"GROUP_RANK", "0"},
     {"MASTER_ADDR", "127.0.0.1"},
     {"MASTER_PORT", "29500"},
     {"TORCHELASTIC_RUN_ID", "none"},
     {"TORCHELASTIC_RESTART_COUNT", "0"}},
    {{"SLURM_JOB_ID", "7"},
     {"SLURM_STEP_ID", "0"},
     {"SLURM_PROCID", "1"},
     {"SLURM_NTASKS", "2"},
     {"SLURM_STEP_NUM_TASKS", "2"},
     {"SLURM_TASKS_PER_NODE", "1(x2)"},
     {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
     {"SLURM_LOCALID", "0"},
     {"SLURM_NODEID", "1"}},
    {{"OMPI_COMM_WORLD_RANK", "0"},
     {"OMPI_COMM_WORLD_SIZE", "2"},
     {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
     {"PMIX_RANK", "0"},
     {"PMIX_NAMESPACE", "1467613185"}},
    {{"PMI_RANK", "1"},
     {"PMI_SIZE", "2"},
     {"PMI_FD", "6"},
     {"MPI_LOCALRANKID", "1"},
     {"MPI_LOCALNRANKS", "2"}},
};

const std::vector<std::string> kGarbage = {"",
                                           " ",
                                           "\t1",
                                           "1 ",
                                           "0",
                                           "1",
                                           "2",
                                           "3",
                                           "-1",
                                           "+1",
                                           "-2147483649",
                                           "2147483648",
                                           "99999999999999999999",
                                           "16777217",
                                           "0x1",
                                           "1.0",
                                           "1e0",
                                           "nan",
                                           "one",
                                           "1,1",
                                           "1(x",
                                           "1(x2),",
                                           "2(x2147483647)",
                                           "(x2)",
                                           "%s%n",
                                           "$(id)",
                                           "\xff\xfe",
                                           "\n",
                                           std::string(100'000, '9')};

template <class T>
std::size_t any_of(const T& things, std::mt19937& random) {
  return std::uniform_int_distribution<std::size_t>(0, things.size() - 1)(random);
}

/// The variables of one launcher, or of two at once, with one to four faults.
Values damaged_environment(unsigned seed) {
  std::mt19937 random(seed);
  Values values = kLaunchers[any_of(kLaunchers, random)];
  if (random() % 4 == 0) values.merge(Values(kLaunchers[any_of(kLaunchers, random)]));
  const unsigned n_faults = 1 + random() % 4;
  for (unsigned fault = 0; fault < n_faults && values.size() > 1; ++fault) {
    const auto one = std::next(values.begin(), static_cast<std::ptrdiff_t>(any_of(values, random)));
    const auto other =
        std::next(values.begin(), static_cast<std::ptrdiff_t>(any_of(values, random)));
    switch (random() % 3) {
      case 0: values.erase(one); break;
      case 1: one->second = kGarbage[any_of(kGarbage, random)]; break;
      case 2: std::swap(one->second, other->second); break;
    }
  }
  return values;
}

std::string text_of(const Values& values) {
  std::string text;
  for (const auto& [name, value] : values) {
    text += fmt::format("  {}='{}'\n", name, value.substr(0, 40));
  }
  return text;
}

/// An error that names a variable, or that an engine gave, with the operation and the rank.
bool is_clear(const std::string& out) {
  if (!out.starts_with("Error: ") && !out.starts_with("PeerLost: ")) return false;
  if (out.find(" on group 'world' (rank ") != std::string::npos) return true;
  for (const Values& launcher : kLaunchers) {
    for (const auto& [name, value] : launcher) {
      if (out.find(name) != std::string::npos) return true;
    }
  }
  return false;
}

TEST(EnvironmentFaultsTest, two_hundred_of_them_end_in_clear_errors) {
  constexpr unsigned kFaults = 200;
  constexpr unsigned kAtOnce = 8;
  std::array<int, 2> n_ended{};  // alone, with an error
  for (unsigned first = 0; first < kFaults; first += kAtOnce) {
    std::vector<Values> environments;
    std::vector<std::unique_ptr<Command>> programs;
    for (unsigned seed = first; seed < first + kAtOnce; ++seed) {
      environments.push_back(damaged_environment(seed));
      Values variables = environments.back();
      variables.emplace("LOCKSTEP_TIMEOUT", "0.1");  // for peers that are never there
      // A watchdog: timeout ends what hangs by SIGKILL, as 137.
      programs.push_back(std::make_unique<Command>(
          StartOptions{.variables = variables,
                       .shell = "exec timeout -s KILL 60 '" COLLECTIVES_PROGRAM "' sum"}));
    }
    for (unsigned i = 0; i < kAtOnce; ++i) {
      const Ended ended = programs[i]->wait();
      const std::string about = fmt::format("fault {}:\n{}out: {}\nerr: {}\n", first + i,
                                            text_of(environments[i]), ended.out, ended.err);
      if (ended.exit_code == 0) {
        ++n_ended[0];
        EXPECT_TRUE(ended.out.starts_with("rank 0 of 1: sum 1, backend ")) << about;
        continue;
      }
      ++n_ended[1];
      EXPECT_TRUE(ended.exit_code == 1 || ended.exit_code == 2) << about;
      EXPECT_TRUE(is_clear(ended.out)) << about;
      EXPECT_TRUE(programs[i]->processes().empty()) << about;
    }
  }
  std::printf("%d ran alone, %d ended with an error\n", n_ended[0], n_ended[1]);
  EXPECT_GT(n_ended[1], 100);
}

}  // namespace
}  // namespace lockstep::test
