// Programs in other languages over liblockstep.so, as ranks of real jobs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {

/// What a shell line prints; fails the test if it fails.
std::string output_of(const std::string& line) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen((line + " 2>&1").c_str(), "r"), pclose);
  std::string text;
  for (int letter = 0; pipe && (letter = std::fgetc(pipe.get())) != EOF;) {
    text += static_cast<char>(letter);
  }
  return text;
}

bool has_command(const std::string& name) { return !output_of("command -v " + name).empty(); }

/// The ranks of `program` end with `code`; what they printed.
std::string outcome_of(std::vector<std::string> program, int code,
                       const std::vector<std::string>& options = {"-n", "3"}) {
  std::vector<std::string> arguments = options;
  arguments.insert(arguments.end(), program.begin(), program.end());
  const Ended ended = run(arguments);
  EXPECT_EQ(ended.exit_code, code) << ended.err << ended.out;
  return ended.out;
}

void expect_lines(const std::string& text, const std::string& pattern, int n) {
  const std::regex expression(pattern);
  const auto begin = std::sregex_iterator(text.begin(), text.end(), expression);
  EXPECT_EQ(std::distance(begin, std::sregex_iterator()), n) << text << "\n  lacks: " << pattern;
}

/// Number of the source line of operations.c that has this text.
int line_of(const std::string& part) {
  std::ifstream file(C_SOURCES "/operations.c");
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    if (contains(line, part)) return number;
  }
  ADD_FAILURE() << "no line with " << part;
  return 0;
}

class CWorldsTest : public testing::TestWithParam<int> {};

TEST_P(CWorldsTest, every_operation) {
  const std::string n = std::to_string(GetParam());
  expect_lines(outcome_of({C_OPERATIONS, "all"}, 0, {"-n", n}),
               "rank \\d of " + n + ": all, over (shared|solo)\n", GetParam());
}

INSTANTIATE_TEST_SUITE_P(Worlds, CWorldsTest, testing::Values(1, 2, 3, 5));

TEST(CBindingTest, without_a_launcher_the_world_is_one_rank) {
  EXPECT_TRUE(contains(output_of(C_OPERATIONS " all"), "rank 0 of 1: all, over solo"));
}

TEST(CBindingTest, two_groups_at_once_from_two_threads) {
  expect_lines(outcome_of({C_OPERATIONS, "threads"}, 0), "rank \\d: both groups", 3);
}

TEST(CBindingTest, what_one_rank_refuses_is_a_mismatch_for_the_others) {
  for (const std::string n : {"2", "3"}) {
    const std::string text = outcome_of({C_OPERATIONS, "refusals"}, 0, {"-n", n});
    expect_lines(text, "rank \\d: refusals", std::stoi(n));
  }
}

TEST(CBindingTest, a_mismatch_names_the_lines_of_the_callers) {
  const std::string text = outcome_of({C_OPERATIONS, "mismatch", "1"}, 1);
  const int barrier = line_of("status = lockstep_barrier(world, DEFAULT, LOCKSTEP_HERE)");
  const int others = line_of(
      "return lockstep_all_reduce(world, &value, 1, LOCKSTEP_F32, "
      "LOCKSTEP_SUM, DEFAULT, LOCKSTEP_HERE)");
  expect_lines(text, "status 2 operation (barrier|all_reduce) rank \\d culprit 1 peers 1 line", 3);
  expect_lines(text, "\n  1     barrier .* operations\\.c:" + std::to_string(barrier) + "\n", 3);
  expect_lines(text, "\n  0, 2  all_reduce .* operations\\.c:" + std::to_string(others) + "\n", 3);
}

TEST(CBindingTest, a_killed_rank_is_named) {
  // Ranks that have the news end; the grace is for a slow machine.
  const std::string text =
      outcome_of({C_OPERATIONS, "lose", "1"}, 137, {"-n", "3", "--grace", "20"});
  expect_lines(text, "status 4 operation all_reduce rank [02] culprit 1 peers 1 line", 2);
  expect_lines(text, "rank 1 was killed", 2);
}

TEST(CBindingTest, a_rank_that_gives_up_is_named_with_its_reason) {
  const std::string text =
      outcome_of({C_OPERATIONS, "abandon", "1"}, 1, {"-n", "3", "--grace", "20"});
  expect_lines(text, "status 5 operation all_reduce rank \\d culprit 1 peers 1 line", 3);
  expect_lines(text, "rank 1 failed: no data", 3);
}

TEST(CBindingTest, a_late_rank_is_named) {
  const Ended ended = run({"-n", "3", "--grace", "0.1", C_OPERATIONS, "late", "1"});
  EXPECT_NE(ended.exit_code, 0);
  expect_lines(ended.out, "status 3 operation barrier rank [02] culprit 1 peers 1 line", 2);
}

TEST(CBindingTest, only_the_functions_of_the_header_are_exported) {
  std::vector<std::string> exported;
  for (const std::string& line : lines_of(output_of("nm -D --defined-only " C_LIBRARY))) {
    const std::string name = line.substr(line.find_last_of(' ') + 1);
    if (!contains(line, " A ")) exported.push_back(name.substr(0, name.find('@')));
  }
  std::ifstream header(C_HEADER);
  const std::string text{std::istreambuf_iterator<char>(header), {}};
  std::vector<std::string> declared;
  const std::regex function("LOCKSTEP_API [^;(]*?(lockstep_\\w+)\\(");
  for (std::sregex_iterator at(text.begin(), text.end(), function), end; at != end; ++at) {
    declared.push_back((*at)[1]);
  }
  EXPECT_GT(declared.size(), 50U);
  std::sort(exported.begin(), exported.end());
  std::sort(declared.begin(), declared.end());
  EXPECT_EQ(exported, declared);
}

TEST(CBindingTest, the_library_is_named_by_its_major_version) {
  EXPECT_TRUE(contains(output_of("readelf -d " C_LIBRARY), "Library soname: [liblockstep.so.0]"));
}

TEST(CBindingTest, python_calls_it_by_ctypes) {
  if (!has_command("python3")) GTEST_SKIP() << "no python3";
  expect_lines(outcome_of({"python3", C_SOURCES "/operations.py", C_LIBRARY}, 0),
               "rank \\d of 3 lockstep \\d", 3);
  const std::string text = outcome_of({"python3", C_SOURCES "/operations.py", C_LIBRARY, "fail"}, 1,
                                      {"-n", "3", "--grace", "20"});
  expect_lines(text, "\n  1     barrier .* operations\\.py:\\d+\n", 3);
  expect_lines(text, "culprit 1\n", 3);
}

TEST(RustBindingTest, rust_calls_it) {
  if (!has_command("rustc")) GTEST_SKIP() << "no rustc: `./dev test --all` installs it";
  const TemporaryFolder folder;
  const std::string program = folder / "operations";
  const std::string library(C_LIBRARY);
  const std::string where = library.substr(0, library.find_last_of('/'));
  const std::string messages =
      output_of("rustc --edition 2021 -D warnings -L native=" + where + " -C link-arg=-Wl,-rpath," +
                where + " -o " + program + " " C_SOURCES "/operations.rs");
  ASSERT_EQ(messages, "");
  expect_lines(outcome_of({program}, 0), "rank \\d of 3\n", 3);
  const std::string text = outcome_of({program, "fail"}, 1, {"-n", "3", "--grace", "20"});
  expect_lines(text, "\n  1     barrier .* operations\\.rs:\\d+\n", 3);
  expect_lines(text, "\n  0, 2  all_reduce .* operations\\.rs:\\d+", 3);
}

}  // namespace
}  // namespace lockstep::test
