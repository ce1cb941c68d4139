#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "cli/command.hpp"
#include "support/expect.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {

Ended command(const std::vector<std::string>& arguments) {
  return Command(StartOptions{.arguments = arguments}).wait();
}

void expect_refused(const std::vector<std::string>& arguments, const std::string& text,
                    int exit_code = 2) {
  const Ended ended = run(arguments);
  EXPECT_EQ(ended.exit_code, exit_code);
  expect_contains(ended.err, text);
  EXPECT_EQ(ended.out, "");
}

TEST(CliTest, help_and_version) {
  const Ended help = command({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  expect_contains(help.out, "lockstep run -n 4 -- ./my_program");
  const Ended version = command({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_TRUE(version.out.starts_with("lockstep ")) << version.out;
  const Ended nothing = command({});
  EXPECT_EQ(nothing.exit_code, 2);
  expect_contains(nothing.err, "Usage");
}

TEST(CliTest, unknown_subcommand) {
  const Ended ended = command({"walk"});
  EXPECT_EQ(ended.exit_code, 2);
  expect_contains(ended.err, "'walk'");
  EXPECT_NE(command({"./walk"}).err.find("lockstep run -n N -- ./program"), std::string::npos);
}

TEST(RunUsageTest, help_explains) {
  const Ended help = run({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* text : {"Example", "OMP_NUM_THREADS", "LOCKSTEP_RESTART", "--max-restarts",
                           "--log-dir", "--grace", "--bind", "--prefix", "Exit code"}) {
    EXPECT_NE(help.out.find(text), std::string::npos) << text;
  }
}

TEST(RunUsageTest, unknown_flag) { expect_refused({"--bogus", "-n", "2", "true"}, "--bogus"); }

TEST(RunUsageTest, no_program) {
  expect_refused({"-n", "2"}, "no program");
  expect_refused({"-n", "2", "--"}, "no program");
}

TEST(RunUsageTest, bad_number_of_ranks) {
  expect_refused({"-n", "0", "true"}, "got '0'");
  expect_refused({"-n", "-3", "true"}, "got '-3'");
  expect_refused({"-n", "513", "true"}, "got '513'");
  expect_refused({"-n", "four", "true"}, "got 'four'");
  expect_refused({"-n", "4x", "true"}, "got '4x'");
  expect_refused({"true"}, "-n is required");
  expect_refused({"--ranks", "3", "true"}, "unknown option '--ranks'; the number of ranks is -n N");
  expect_refused({"-np", "3", "true"}, "unknown option '-np'");
  expect_refused({"-n2", "--nope", "true"}, "unknown option '--nope'\n");
  expect_refused({"-n-2", "true"}, "got '-2'");
}

TEST(RunUsageTest, bad_values) {
  expect_refused({"-n", "1", "--bind", "socket", "true"}, "got 'socket', expected one of: core");
  expect_refused({"-n", "1", "--prefix", "maybe", "true"}, "got 'maybe'");
  expect_refused({"-n", "1", "--grace", "long", "true"}, "got 'long'");
  expect_refused({"-n", "1", "--max-restarts", "-1", "true"}, "got '-1'");
}

TEST(RunUsageTest, empty_names) {
  for (const char* option : {"--log-dir", "--trace", "--rdzv-secret"}) {
    expect_refused({"-n", "1", option, "", "echo", "started"}, option);
  }
}

TEST(RunUsageTest, program_not_found) {
  expect_refused({"-n", "2", "no-such-program-here"}, "no-such-program-here", /*exit_code=*/127);
  expect_refused({"-n", "2", "/no/such/program"}, "/no/such/program", /*exit_code=*/127);
  expect_refused({"-n", "2", "hello.py"}, "lockstep run -n N python hello.py", /*exit_code=*/127);
}

TEST(RunUsageTest, program_cannot_run) {
  const TemporaryFolder folder;
  expect_refused({"-n", "2", folder / "."}, "directory", /*exit_code=*/126);
  const std::string plain = folder / "plain";
  std::ofstream(plain) << "echo hello\n";
  expect_refused({"-n", "2", plain}, "Permission denied", /*exit_code=*/126);
  const std::string script = plain + ".py";
  std::ofstream(script) << "print('hello')\n";
  expect_refused({"-n", "2", script}, "lockstep run -n N python ", /*exit_code=*/126);
  chmod(plain.c_str(), 0755);
  expect_refused({"-n", "2", plain}, "'#!'", /*exit_code=*/126);
  const std::string orphan = folder / "orphan";
  std::ofstream(orphan) << "#!/no/such/interpreter\n";
  chmod(orphan.c_str(), 0755);
  expect_refused({"-n", "2", orphan}, "interpreter", /*exit_code=*/126);
}

TEST(RunUsageTest, bad_master_port) {
  const Ended ended = run(StartOptions{.arguments = {"-n", "2", "echo", "started"},
                                       .variables = {{"MASTER_PORT", "http"}}});
  EXPECT_EQ(ended.exit_code, 2);
  expect_contains(ended.err, "'http'");
  EXPECT_EQ(ended.out, "");
}

TEST(RunUsageTest, too_few_files_for_the_ranks) {
  const Ended ended = run(StartOptions{.arguments = {"-n", "64", "echo", "started"},
                                       .shell = "ulimit -n 100; exec \"$@\""});
  EXPECT_EQ(ended.exit_code, 2);
  expect_contains(ended.err, "limit is 100");
  EXPECT_EQ(ended.out, "");
}

}  // namespace
}  // namespace lockstep::test
