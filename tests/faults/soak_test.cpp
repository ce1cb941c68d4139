// Mixed load on every operation: nothing grows. `./dev soak` does so for longer.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "cli/command.hpp"
#include "support/expect.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {

constexpr int kSeconds = 4;

void expect_no_growth(const std::string& shell) {
  const TemporaryFolder folder;  // the command's own watchdog is for short runs
  const int status = std::system(fmt::format("{} >{}", shell, folder / "out").c_str());
  EXPECT_EQ(status, 0);
  const std::string said = contents_of(folder / "out");
  fmt::print("{}", said);
  expect_contains(said, " rounds, then ");
}

TEST(SoakTest, processes_hold_no_more_after_mixed_load) {
  expect_no_growth(fmt::format("{} run -n 3 {} {}", LOCKSTEP_COMMAND, SOAK, kSeconds));
}

TEST(SoakTest, threads_hold_no_more_after_mixed_load) {
  expect_no_growth(fmt::format("{} {} 3", SOAK, kSeconds));
}

}  // namespace
}  // namespace lockstep::test
