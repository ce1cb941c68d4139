#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

const std::string kCtrlC = "\x03";
const std::string kCtrlD = "\x04";
const std::string kCtrlZ = "\x1a";

/// An interactive shell at a terminal, in which $L is `lockstep run` and $C a program of ranks.
StartOptions shell() {
  return {.arguments = {"-i"},
          .variables = {{"PS1", "ready> "},
                        {"ENV", ""},
                        {"NO_COLOR", "1"},
                        {"L", LOCKSTEP_COMMAND " run"},
                        {"C", COLLECTIVES_PROGRAM}},
          .session = true,
          .program = "/bin/sh"};
}

/// Starts the shell and types the line.
void begin(Command& command, const std::string& line) {
  command.read_until("ready> ");
  command.type(line + "\n");
}

void leave(Command& command) {
  command.type("exit 0\n");
  EXPECT_EQ(command.wait().exit_code, 0);
  command.expect_nothing_left();
}

void interrupt_and_leave(Command& command) {
  command.type(kCtrlC);
  command.read_until("ready> ", 2);
  leave(command);
}

void expect_ctrl_c_for_all(Command& command) {
  command.type(kCtrlC);
  command.read_until("SIGINT: forwarded to the ranks");
  command.read_until("ready> ", 2);
  command.type("echo code $?\n");
  command.read_until("code 130");
  leave(command);
}

std::string name_of(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/comm");
  std::string name;
  std::getline(file, name);
  return name;
}

/// The processes with this name that run.
std::vector<pid_t> named(const Command& command, const std::string& name) {
  std::vector<pid_t> found = command.processes();
  std::erase_if(found, [&](pid_t process) { return name_of(process) != name; });
  return found;
}

bool are_stopped(const std::vector<pid_t>& processes) {
  return !processes.empty() &&
         std::ranges::all_of(processes, [](pid_t process) { return thread_state(process) == 'T'; });
}

const std::string kRead =
    R"(sh -c 'printf "[%s?]" $RANK; read x && echo "$RANK got <$x>" || echo "$RANK got none"')";

TEST(RunTerminalTest, rank_0_reads_the_terminal_and_others_its_end) {
  Command command(shell());
  begin(command, "$L -n 2 " + kRead);
  command.read_until("[0] [0?]");  // before its line ends
  command.read_until("1 got none");
  command.type("hello\n");
  command.read_until("0 got <hello>");
  command.read_until("ready> ", 2);
  command.type("echo the sh''ell reads\n");  // it has the foreground again
  command.read_until("the shell reads");
  leave(command);
}

TEST(RunTerminalTest, another_rank_reads_or_none) {
  Command command(shell());
  begin(command, "$L -n 3 --stdin 1 " + kRead);
  command.read_until("0 got none");
  command.read_until("2 got none");
  command.type("hello\n");
  command.read_until("1 got <hello>");
  command.read_until("ready> ", 2);
  command.type("$L -n 2 --stdin none " + kRead + "\n");
  command.read_until("0 got none", 2);
  command.read_until("ready> ", 3);
  leave(command);
}

TEST(RunTerminalTest, end_of_what_is_typed) {
  Command command(shell());
  begin(command, "$L -n 1 " + kRead);
  command.read_until("[0] [0?]");
  command.type(kCtrlD);
  command.read_until("0 got none");
  leave(command);
}

TEST(RunTerminalTest, rank_that_reads_nothing_leaves_what_is_typed) {
  Command command(shell());
  begin(command, "$L -n 1 $C read 5; echo en''ded");
  command.type("echo the sh''ell reads\n");
  command.read_until("the shell reads");
  leave(command);
}

TEST(RunTerminalTest, ctrl_c_ends_all_ranks_while_one_reads) {
  Command command(shell());
  begin(command, "$L -n 2 sh -c '[ $RANK = 0 ] && { printf ask; cat; }; sleep 1000'");
  command.read_until("[0] ask");
  command.type("typed\n");
  command.read_until("typed", 2);  // the echo, and cat's
  expect_ctrl_c_for_all(command);
}

TEST(RunTerminalTest, ctrl_c_is_for_all_ranks_though_it_ends_the_one_that_reads_first) {
  for (const std::string elastic : {"", "--elastic 1 "}) {
    Command command(shell());
    begin(command, "$L -n 2 " + elastic + "sh -c '[ $RANK = 0 ] && cat; sleep 1000'");
    command.type("typed\n");
    command.read_until("[0] typed");
    ASSERT_TRUE(wait_until([&] { return named(command, "lockstep-relay").size() == 1; }));
    kill(named(command, "lockstep-relay")[0], SIGSTOP);  // it is slow
    expect_ctrl_c_for_all(command);
  }
}

TEST(RunTerminalTest, replacement_reads_nothing) {
  Command command(shell());
  begin(command,
        "$L -n 2 --elastic 1 sh -c '[ $RANK = 0 ] || sleep 1000; read x && kill -9 $$; echo \"then "
        "<$x>\"; sleep 1000'");
  command.type("hello\n");
  command.read_until("then <>");
  interrupt_and_leave(command);
}

TEST(RunTerminalTest, other_rank_that_opens_the_terminal_is_named) {
  Command command(shell());
  begin(command, "$L -n 2 sh -c '[ $RANK = 0 ] || read x < /dev/tty; sleep 1000'");
  command.read_until(
      "is stopped (SIGTTIN): it uses the terminal, which is for rank 0; --stdin 1 "
      "gives it to this rank");
  interrupt_and_leave(command);
}

TEST(RunTerminalTest, job_that_reads_in_the_background_stops) {
  Command command(shell());
  begin(command, "$L -n 2 $C read 0 &");
  command.read_until("joined");  // of both: the job may stop before the other one has said so
  ASSERT_TRUE(wait_until([&] {
    return are_stopped(named(command, "cli_collectives")) &&
           are_stopped(named(command, "lockstep"));
  }));
  command.type("fg\n");
  command.type("hello\n");
  command.read_until("rank 0 read hello");
  command.read_until("got through", 2);
  leave(command);
}

constexpr std::chrono::seconds kLimit{4};
const std::string kWithLimit = "LOCKSTEP_TIMEOUT=4 ";

TEST(RunTerminalTest, ctrl_z_stops_the_job_and_its_limits_while_a_rank_reads) {
  Command command(shell());
  begin(command, kWithLimit + "$L -n 3 $C read 0");
  command.read_until("joined", 3);
  const std::vector<pid_t> ranks = named(command, "cli_collectives");
  ASSERT_TRUE(wait_until([&] { return named(command, "lockstep-relay").size() == 1; }));
  for (int i = 0; i < 2; ++i) {
    command.type(kCtrlZ);
    ASSERT_TRUE(wait_until([&] { return are_stopped(ranks); }));
    command.read_until("ready> ", 2 + i);
    if (i == 0) outlast(kLimit);
    command.type("fg\n");
    ASSERT_TRUE(wait_until([&] { return thread_state(ranks.back()) != 'T'; }));
  }
  command.type("hello\n");
  command.read_until("rank 0 read hello");
  command.read_until("got through", 3);
  leave(command);
}

/// A job that does not read the terminal, once its ranks have joined, until the shell asks again.
void stop_by_ctrl_z(Command& command, int n_ranks) {
  command.read_until("joined", n_ranks);
  const std::vector<pid_t> ranks = named(command, "cli_collectives");
  command.type(kCtrlZ);
  EXPECT_TRUE(wait_until([&] { return are_stopped(ranks); }));
  command.read_until("ready> ", 2);
}

TEST(RunTerminalTest, ctrl_z_stops_a_job_that_does_not_read_the_terminal) {
  const TemporaryFolder folder;
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const base::UniqueFd ends(open(pipe.c_str(), O_RDWR | O_CLOEXEC));
  Command command(shell());
  begin(command, kWithLimit + "$L -n 3 --stdin 2 $C read 2 < " + pipe);
  stop_by_ctrl_z(command, 3);
  outlast(kLimit);
  command.type("fg\n");
  ASSERT_EQ(write(ends.get(), "hello\n", 6), 6);
  command.read_until("rank 2 read hello");
  command.read_until("got through", 3);
  leave(command);
}

TEST(RunTerminalTest, stopped_job_can_be_ended) {
  Command command(shell());
  begin(command, "$L -n 2 $C lose 0");
  stop_by_ctrl_z(command, 2);
  command.type("kill -HUP %1; fg\n");
  command.read_until("SIGHUP: forwarded to the ranks");
  command.read_until("ready> ", 3);
  leave(command);
}

TEST(RunTerminalTest, job_that_no_shell_continues_does_not_wait_for_the_terminal) {
  Command command(shell());
  begin(command, "(sh -c \"$L -n 1 cat\" < /dev/tty &)");
  command.read_until("uses the terminal, which this job cannot get: killing it");
  leave(command);
}

TEST(RunTerminalTest, stdin_that_is_no_terminal) {
  const std::vector<std::string> reads = {"/bin/sh", "-c", "echo $RANK $(cat)"};
  std::vector<std::string> arguments = {"-n", "2", "--stdin", "1"};
  arguments.insert(arguments.end(), reads.begin(), reads.end());
  const Ended ended = run(StartOptions{.arguments = arguments, .input = "hello"});
  EXPECT_EQ(sorted_lines_of(ended.out), (std::vector<std::string>{"0", "1 hello"}));
}

TEST(RunTerminalTest, wrong_stdin) {
  for (const std::string rank : {"-1", "x", ""}) {
    const Ended ended = run({"-n", "2", "--stdin", rank, "true"});
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_TRUE(contains(ended.err, "--stdin is '" + rank + "', expected a rank, from 0, or none"))
        << ended.err;
  }
  const Ended ended = run({"-n", "2", "--stdin", "2", "true"});
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.err, "--stdin is 2, but the ranks are 0 to 1")) << ended.err;
}

}  // namespace
}  // namespace lockstep::test
