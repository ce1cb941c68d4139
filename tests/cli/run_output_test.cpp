#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/expect.hpp"
#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

using Lines = std::vector<std::string>;

TEST(RunOutputTest, piped_output_has_no_prefix_and_no_colour) {
  const Ended ended = run(script({"-n", "2"}, "echo out; echo err >&2"));
  EXPECT_EQ(ended.out, "out\nout\n");
  EXPECT_EQ(ended.err, "err\nerr\n");
}

TEST(RunOutputTest, prefix_always) {
  const Ended ended =
      run(script({"-n", "2", "--prefix", "always"}, "echo a; echo; echo c >&2; printf d"));
  Lines of_rank_1 = lines_of(ended.out);
  std::erase_if(of_rank_1, [](const std::string& line) { return !line.starts_with("[1] "); });
  EXPECT_EQ(of_rank_1, (Lines{"[1] a", "[1] ", "[1] d"})) << ended.out;
  EXPECT_EQ(sorted_lines_of(ended.err), (Lines{"[0] c", "[1] c"}));
}

TEST(RunOutputTest, terminal_has_coloured_prefixes) {
  const Ended ended = run(
      StartOptions{.arguments = script({"-n", "2"}, "echo out; echo err >&2"), .terminal = true});
  const Lines lines = sorted_lines_of(ended.out);
  ASSERT_EQ(lines.size(), 4U) << ended.out;
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "\x1b[36m[0]\x1b[0m out\r"), 1) << ended.out;
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "\x1b[36m[0]\x1b[0m err\r"), 1) << ended.out;
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "\x1b[32m[1]\x1b[0m out\r"), 1) << ended.out;
}

TEST(RunOutputTest, terminal_without_colour_or_prefix) {
  const std::vector<std::string> arguments = script({"-n", "1"}, "echo out");
  EXPECT_EQ(
      run(StartOptions{.arguments = arguments, .variables = {{"NO_COLOR", "1"}}, .terminal = true})
          .out,
      "[0] out\r\n");
  EXPECT_EQ(run(StartOptions{.arguments = script({"-n", "1", "--prefix", "never"}, "echo out"),
                             .terminal = true})
                .out,
            "out\r\n");
}

TEST(RunOutputTest, ranks_see_a_terminal_where_there_is_one) {
  const std::string look = "[ -t 1 ] && stty size <&1; [ -t 1 ] || echo none";
  EXPECT_EQ(run(StartOptions{.arguments = script({"-n", "1", "--prefix", "never"}, look),
                             .terminal = true})
                .out,
            "24 74\r\n");
  EXPECT_EQ(run(script({"-n", "1"}, look)).out, "none\n");
}

TEST(RunOutputTest, progress_bar_shows_before_its_line_ends) {
  Command command(
      StartOptions{.arguments = {"run", "-n", "1", "/bin/sh", "-c", "printf '10%%\\r'; sleep 1000"},
                   .variables = {{"NO_COLOR", "1"}},
                   .terminal = true});
  command.read_until("[0] 10%\r");
}

TEST(RunOutputTest, carriage_return_gets_the_prefix_again) {
  const Ended ended = run(StartOptions{.arguments = {"-n", "1", "printf", "10%%\\r20%%\\n"},
                                       .variables = {{"NO_COLOR", "1"}},
                                       .terminal = true});
  EXPECT_EQ(ended.out, "[0] 10%\r[0] 20%\r\n");
}

TEST(RunOutputTest, endless_line_is_passed_on_before_its_end) {
  Command command(
      StartOptions{.arguments = {"run", "-n", "1", "/bin/sh", "-c",
                                 "printf begin; head -c 3000000 /dev/zero; sleep 1000"}});
  command.read_until("begin");
}

TEST(RunOutputTest, last_line_without_an_end) {
  EXPECT_EQ(run({"-n", "1", "printf", "no end"}).out, "no end");
  EXPECT_EQ(run({"-n", "2", "printf", "no end"}).out, "no end\nno end");
}

TEST(RunOutputTest, binary_output_passes_unchanged) {
  const TemporaryFolder folder;
  std::mt19937 generator(5);
  std::string bytes(1'000'000, '\0');
  for (char& byte : bytes) byte = static_cast<char>(generator());
  std::ofstream(folder / "bytes", std::ios::binary) << bytes;
  const Ended ended =
      run(script({"-n", "3"}, fmt::format("[ $RANK = 1 ] && cat {}; true", folder / "bytes")));
  EXPECT_TRUE(ended.out == bytes) << ended.out.size();
}

TEST(RunOutputTest, ten_megabytes_of_four_ranks_never_mix) {
  const Ended ended = run(script({"-n", "4"},
                                 "seq -f \"rank $RANK line %.0f of a text that goes on\" 1 70000; "
                                 "seq -f \"rank $RANK error %.0f\" 1 2000 >&2"));
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_GT(ended.out.size(), 10'000'000U);
  std::vector<int> next(4, 1);
  for (const std::string& line : lines_of(ended.out)) {
    const auto rank = static_cast<std::size_t>(line.at(5) - '0');
    ASSERT_EQ(line, fmt::format("rank {} line {} of a text that goes on", rank, next.at(rank)));
    ++next[rank];
  }
  EXPECT_EQ(next, std::vector<int>(4, 70001));
  EXPECT_EQ(lines_of(ended.err).size(), 8000U);
}

TEST(RunOutputTest, line_written_in_pieces_stays_whole) {
  // The pauses vary how the pieces come; the result is the same.
  const std::string text = "for i in 1 2 3 4 5 6; do printf \"$RANK\"; sleep 0.02; done; echo";
  const Ended ended = run(script({"-n", "3"}, text));
  EXPECT_EQ(sorted_lines_of(ended.out), (Lines{"000000", "111111", "222222"}));
}

TEST(RunOutputTest, very_long_lines) {
  const std::string line = "head -c 5000000 /dev/zero | tr '\\0' $RANK";
  EXPECT_TRUE(run(script({"-n", "1"}, line)).out == std::string(5'000'000, '0'));
  // Two of them may have to break, but never mix, and lose nothing.
  const Ended ended = run(script({"-n", "2"}, line));
  std::vector<long> n_bytes(2, 0);
  for (const std::string& piece : lines_of(ended.out)) {
    ASSERT_EQ(piece.find_first_not_of(piece.at(0)), std::string::npos);
    n_bytes.at(static_cast<std::size_t>(piece[0] - '0')) += static_cast<long>(piece.size());
  }
  EXPECT_EQ(n_bytes, std::vector<long>(2, 5'000'000));
}

/// Whether all processes of the command sleep: 0 where one does not, else how often they have
/// slept.
long n_sleeps_of_all(const Command& command) {
  long n = 0;
  for (const pid_t pid : command.processes()) {
    if (!is_asleep(pid)) return 0;
    n += n_sleeps(pid);
  }
  return n;
}

TEST(RunOutputTest, slow_reader_slows_the_ranks_down) {
  const TemporaryFolder folder;
  Command command(
      StartOptions{.arguments = {"run", "-n", "2", "/bin/sh", "-c",
                                 fmt::format("seq 1 2000000; touch {}", folder / "done")}});
  // No process reads: in the end the launcher, its guard, both ranks and their programs all wait.
  EXPECT_TRUE(wait_until([&] {
    if (std::filesystem::exists(folder / "done")) return true;
    const long before = command.processes().size() == 6 ? n_sleeps_of_all(command) : 0;
    return before > 0 && n_sleeps_of_all(command) == before;
  }));
  EXPECT_FALSE(std::filesystem::exists(folder / "done"));
  const std::string status = contents_of(fmt::format("/proc/{}/status", command.pid()));
#ifdef __SANITIZE_ADDRESS__
  constexpr long kMostKilobytes = 100'000;  // its own needs besides
#else
  constexpr long kMostKilobytes = 32'000;
#endif
  EXPECT_LT(std::stol(status.substr(status.find("VmRSS:") + 6)), kMostKilobytes);
  const Ended ended = command.wait();
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(lines_of(ended.out).size(), 4'000'000U);
}

TEST(RunOutputTest, reader_that_leaves_ends_the_ranks) {
  const Ended ended = run(StartOptions{.arguments = {"-n", "2", "seq", "1", "100000000"},
                                       .shell = "\"$@\" | head -n 1"});
  EXPECT_EQ(ended.out, "1\n");
  expect_contains(ended.err, "SIGPIPE");
}

TEST(RunOutputTest, a_full_disk_makes_it_a_failure) {
  // A limit on the size of files, 4 MiB, stands for the disk.
  const TemporaryFolder folder;
  const std::string out = folder / "out";
  std::ofstream(out) << "";
  std::filesystem::resize_file(out, std::uintmax_t{4} << 20U);
  const Ended ended = run(StartOptions{.arguments = script({"-n", "1"}, "echo hello"),
                                       .shell = "ulimit -f 8192; exec \"$@\" >> " + out});
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.err, "cannot write stdout: File too large")) << ended.err;
}

TEST(RunOutputTest, a_reader_who_left_is_the_failure_of_any_pipeline) {
  const TemporaryFolder folder;
  const std::string gone = folder / "gone";
  const Ended ended =
      run(StartOptions{.arguments = script({"-n", "1"}, "read x < " + gone + "; echo hello"),
                       .shell = "mkfifo " + gone +
                                "; { \"$@\"; echo code $? >&2; } | { exec <&-; "
                                "echo > " +
                                gone + "; }"});
  EXPECT_EQ(ended.err, "code 141\n");  // 128 + SIGPIPE
}

TEST(RunOutputTest, one_file_for_both_outputs_keeps_lines_whole) {
  const Ended ended =
      run(StartOptions{.arguments = script({"-n", "2"},
                                           "seq -f 'out %.0f of a line' 1 20000 & "
                                           "seq -f 'err %.0f of a line' 1 20000 >&2; wait"),
                       .shell = "\"$@\" 2>&1"});
  const Lines lines = lines_of(ended.out);
  EXPECT_EQ(lines.size(), 80000U);
  for (const std::string& line : lines) {
    ASSERT_TRUE((line.starts_with("out ") || line.starts_with("err ")) &&
                line.ends_with(" of a line") && line.size() < 24)
        << line;
  }
}

TEST(RunOutputTest, closed_standard_descriptors) {
  const Ended ended = run(
      StartOptions{.arguments = script({"-n", "2"}, "echo $RANK >&2"), .shell = "\"$@\" <&- >&-"});
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(sorted_lines_of(ended.err), (Lines{"0", "1"}));
}

// --- logs -----------------------------------------------------------------------------------

TEST(RunLogTest, one_file_per_rank_and_output) {
  const TemporaryFolder folder;
  const Ended ended = run(script({"-n", "2", "--log-dir", folder / "a/b", "--prefix", "always"},
                                 "echo out $RANK; printf err$RANK >&2"));
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(sorted_lines_of(ended.out), (Lines{"[0] out 0", "[1] out 1"}));
  EXPECT_EQ(contents_of(folder / "a/b/rank-0.out"), "out 0\n");
  EXPECT_EQ(contents_of(folder / "a/b/rank-1.out"), "out 1\n");
  EXPECT_EQ(contents_of(folder / "a/b/rank-0.err"), "err0");
  EXPECT_EQ(contents_of(folder / "a/b/rank-1.err"), "err1");
}

TEST(RunLogTest, does_not_overwrite) {
  const TemporaryFolder folder;
  std::ofstream(folder / "rank-1.err") << "precious";
  const Ended ended = run({"-n", "2", "--log-dir", folder / ".", "echo", "started"});
  EXPECT_EQ(ended.exit_code, 2);
  expect_contains(ended.err, "rank-1.err");
  EXPECT_EQ(ended.out, "");
  EXPECT_EQ(contents_of(folder / "rank-1.err"), "precious");
  EXPECT_FALSE(std::filesystem::exists(folder / "rank-0.out"));
}

TEST(RunLogTest, each_restart_has_its_own) {
  const TemporaryFolder folder;
  run(script({"-n", "2", "--log-dir", folder / ".", "--max-restarts", "1"},
             "echo $LOCKSTEP_RESTART; exit 1"));
  EXPECT_EQ(contents_of(folder / "rank-0.out"), "0\n");
  EXPECT_EQ(contents_of(folder / "rank-1.restart-1.out"), "1\n");
}

TEST(RunLogTest, goes_on_when_the_output_has_no_reader) {
  const TemporaryFolder folder;
  run(StartOptions{.arguments = script({"-n", "1", "--log-dir", folder / "."}, "seq 1 200000"),
                   .shell = "\"$@\" | true"});
  EXPECT_EQ(lines_of(contents_of(folder / "rank-0.out")).size(), 200'000U);
}

TEST(RunLogTest, folder_cannot_be_made) {
  const Ended ended = run({"-n", "1", "--log-dir", "/proc/logs", "echo", "started"});
  EXPECT_EQ(ended.exit_code, 1);
  expect_contains(ended.err, "/proc/logs");
  EXPECT_EQ(ended.out, "");
}

TEST(RunLogTest, full_disk_is_reported_and_the_ranks_go_on) {
  // A limit on the size of files, 4 MiB, stands for the disk.
  const TemporaryFolder folder;
  const Ended ended =
      run(StartOptions{.arguments = script({"-n", "1", "--log-dir", folder / "."}, "seq 1 1000000"),
                       .shell = "ulimit -f 8192; exec \"$@\""});
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(lines_of(ended.out).size(), 1'000'000U);
  expect_contains(ended.err, "log of rank 0's stdout ends here");
}

}  // namespace
}  // namespace lockstep::test
