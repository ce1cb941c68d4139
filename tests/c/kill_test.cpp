// Ranks of the C interface that are killed at any point leave nothing in shared memory.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cli/command.hpp"

namespace lockstep::test {
namespace {

constexpr int kRanks = 4;

/// LOCKSTEP_KILLS=1000 in the environment kills more ranks, in more jobs.
int n_kills() {
  const char* const text = std::getenv("LOCKSTEP_KILLS");
  return text == nullptr ? 40 : std::atoi(text);
}

std::string memory_map_of(pid_t pid) { return contents_of(fmt::format("/proc/{}/maps", pid)); }

/// Of the command's processes, those that run `program`.
std::vector<pid_t> ranks_of(const Command& command, const std::string& program) {
  std::vector<pid_t> ranks;
  for (const pid_t pid : command.processes()) {
    if (contents_of(fmt::format("/proc/{}/cmdline", pid)).starts_with(program)) {
      ranks.push_back(pid);
    }
  }
  return ranks;
}

TEST(KillTest, ranks_killed_at_random_points_leave_nothing) {
  const unsigned seed = std::random_device()();
  std::minstd_rand random(seed);
  SCOPED_TRACE(fmt::format("seed {}", seed));
  for (int killed = 0; killed < n_kills() && !HasFailure();) {
    Command command(StartOptions{.arguments = {"run", "-n", std::to_string(kRanks), C_FOREVER}});
    // In every third job the kills hit ranks that are still joining.
    if (random() % 3 != 0) command.read_until("joined", kRanks);
    std::vector<pid_t> ranks = ranks_of(command, C_FOREVER);
    if (ranks.size() == kRanks && contains(command.out(), "joined")) {
      const std::string map = memory_map_of(ranks.front());
      EXPECT_TRUE(contains(map, "/memfd:lockstep")) << map;
      EXPECT_FALSE(contains(map, "/dev/shm")) << map;
    }
    // Any point of a call: not an order of events.
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    std::shuffle(ranks.begin(), ranks.end(), random);
    for (const pid_t rank : ranks) {
      if (::kill(rank, SIGKILL) == 0) ++killed;
    }
    if (ranks.empty()) command.send(SIGTERM);  // they had not started yet
    EXPECT_NE(command.wait().exit_code, 0);
    command.expect_nothing_left();
  }
}

}  // namespace
}  // namespace lockstep::test
