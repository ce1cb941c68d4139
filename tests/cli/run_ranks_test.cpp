#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <csignal>
#include <set>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {

using Lines = std::vector<std::string>;

std::vector<int> allowed_cores() {
  cpu_set_t set;
  sched_getaffinity(0, sizeof set, &set);
  std::vector<int> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<std::size_t>(cpu), &set)) cores.push_back(cpu);
  }
  return cores;
}

TEST(RunRanksTest, each_rank_knows_its_place) {
  const Ended ended = run(script({"-n", "3"},
                                 "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE "
                                 "$MASTER_ADDR $LOCKSTEP_RESTART"));
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(sorted_lines_of(ended.out),
            (Lines{"0 3 0 3 127.0.0.1 0", "1 3 1 3 127.0.0.1 0", "2 3 2 3 127.0.0.1 0"}));
  EXPECT_EQ(ended.err, "");
}

TEST(RunRanksTest, each_rank_has_the_variables_of_torchrun) {
  const char* const kTold =
      "echo $ROLE_RANK $ROLE_WORLD_SIZE $ROLE_NAME $GROUP_RANK $GROUP_WORLD_SIZE "
      "$TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS; echo id $TORCHELASTIC_RUN_ID; "
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ]";
  const Ended ended = run(script({"-n", "2", "--max-restarts", "1"}, kTold));
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  Lines lines = sorted_lines_of(ended.out);
  ASSERT_EQ(lines.size(), 8U) << ended.out;
  EXPECT_EQ(Lines(lines.begin(), lines.begin() + 4),
            (Lines{"0 2 default 0 1 0 1", "0 2 default 0 1 1 1", "1 2 default 0 1 0 1",
                   "1 2 default 0 1 1 1"}));
  EXPECT_EQ(std::set<std::string>(lines.begin() + 4, lines.end()).size(), 1U) << ended.out;
  EXPECT_GT(lines[4].size(), std::string("id ").size());
  const Lines other = sorted_lines_of(run(script({"-n", "1"}, kTold)).out);
  EXPECT_NE(other.back(), lines.back()) << "the id of another job";
}

TEST(RunRanksTest, auto_is_a_rank_for_each_core) {
  // Of one rank they are all cores that it may use.
  const std::string n_cores = run(script({"-n", "1"}, "echo $OMP_NUM_THREADS")).out;
  EXPECT_EQ(run(script({"-n", "auto"}, "[ $RANK = 0 ] && echo $WORLD_SIZE; true")).out, n_cores);
  const Ended one = run(StartOptions{
      .arguments = script({"-n", "auto"}, "echo $WORLD_SIZE"),
      .shell = "exec taskset -c " + std::to_string(allowed_cores().front()) + " \"$@\""});
  EXPECT_EQ(one.out, "1\n") << one.err;
  EXPECT_EQ(run({"-n", "cores", "true"}).exit_code, 2);
}

TEST(RunRanksTest, outer_variables_give_way) {
  const Ended ended = run(
      StartOptions{.arguments = script({"-n", "1"}, "env | grep -c '^RANK='; echo $RANK $RANK_X"),
                   .variables = {{"RANK", "7"}, {"WORLD_SIZE", "9"}, {"RANK_X", "kept"}}});
  EXPECT_EQ(ended.out, "1\n0 kept\n");
}

TEST(RunRanksTest, master_port_is_one_free_port_or_the_users) {
  const Lines free = lines_of(run(script({"-n", "3"}, "echo $MASTER_PORT")).out);
  ASSERT_EQ(free.size(), 3U);
  EXPECT_EQ(std::set<std::string>(free.begin(), free.end()).size(), 1U);
  EXPECT_GT(std::stoi(free[0]), 0);
  const Ended own = run(StartOptions{.arguments = script({"-n", "2"}, "echo $MASTER_PORT"),
                                     .variables = {{"MASTER_PORT", "29517"}}});
  EXPECT_EQ(own.out, "29517\n29517\n");
}

/// A socket bound to the port, and listening.
base::UniqueFd listen_on(int port, bool reuses_address) {
  base::UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int reuse = reuses_address ? 1 : 0;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  const bool listens =
      bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
      listen(fd.get(), 1) == 0;
  return listens ? std::move(fd) : base::UniqueFd();
}

TEST(RunRanksTest, the_free_master_port_stays_reserved_for_the_ranks) {
  Command ranks(
      StartOptions{.arguments = script({"run", "-n", "1"}, "echo $MASTER_PORT port; sleep 100")});
  ranks.read_until("port\n");
  const int port = std::stoi(ranks.out());
  EXPECT_FALSE(listen_on(port, /*reuses_address=*/false));
  EXPECT_TRUE(listen_on(port, /*reuses_address=*/true));  // as rank 0 does
  ranks.send(SIGINT);
  ranks.wait();
}

TEST(RunRanksTest, inherits_the_segment_and_nothing_else) {
  // The descriptors a rank has: 0, 1, 2, the segment's, the socket to the launcher, and that of ls
  // itself, and those that this test was started with.
  int n_expected = 6;
  for (int fd = 3; fd < 1024; ++fd) {
    if (fcntl(fd, F_GETFD) == 0) ++n_expected;  // open, without FD_CLOEXEC
  }
  const Ended ended = run(script({"-n", "2"},
                                 "[ -e /proc/self/fd/${LOCKSTEP_SEGMENT%%:*} ] && echo segment; "
                                 "ls /proc/self/fd | wc -l"));
  EXPECT_EQ(sorted_lines_of(ended.out),
            (Lines{std::to_string(n_expected), std::to_string(n_expected), "segment", "segment"}))
      << ended.err;
}

TEST(RunRanksTest, passes_arguments_on_untouched) {
  const Lines words = {"-n", "3", "--help", "--", "a b", "", "--bind=x", "*"};
  Lines arguments = {"-n", "2", "printf", "<%s>"};
  arguments.insert(arguments.end(), words.begin(), words.end());
  std::string expected;
  for (const std::string& word : words) expected += fmt::format("<{}>", word);
  EXPECT_EQ(run(arguments).out, expected + "\n" + expected);
  arguments.insert(arguments.begin() + 2, "--");
  EXPECT_EQ(run(arguments).out, expected + "\n" + expected);
}

TEST(RunRanksTest, omp_threads_share_the_cores) {
  const int n_cores = static_cast<int>(allowed_cores().size());
  const Ended one = run(script({"-n", "1"}, "echo $OMP_NUM_THREADS"));
  EXPECT_GE(std::stoi(one.out), 1);
  EXPECT_LE(std::stoi(one.out), n_cores);
  EXPECT_EQ(run(script({"-n", "1"}, "echo $OMP_NUM_THREADS")).out, one.out);
  const Ended many = run(script({"-n", std::to_string(2 * n_cores)}, "echo $OMP_NUM_THREADS"));
  EXPECT_EQ(lines_of(many.out), Lines(static_cast<std::size_t>(2 * n_cores), "1"));
  const Ended own = run(StartOptions{.arguments = script({"-n", "1"}, "echo $OMP_NUM_THREADS"),
                                     .variables = {{"OMP_NUM_THREADS", "5"}}});
  EXPECT_EQ(own.out, "5\n");
}

TEST(RunRanksTest, rank_zero_reads_stdin) {
  const TemporaryFolder folder;  // where the others say that they have read: rank 0 is last
  const Ended ended = run(StartOptions{
      .arguments = script({"-n", "3"}, "[ $RANK = 0 ] && { " + await_file(folder / "1") +
                                           await_file(folder / "2") +
                                           "}; echo $RANK: $(cat); touch " + (folder / "$RANK")),
      .input = "first\nsecond\n"});
  EXPECT_EQ(sorted_lines_of(ended.out), (Lines{"0: first second", "1:", "2:"}));
}

TEST(RunRanksTest, bind_core) {
  const std::vector<int> cores = allowed_cores();
  const int n_ranks = static_cast<int>(cores.size()) + 1;
  const Ended ended =
      run(script({"-n", std::to_string(n_ranks), "--bind", "core"},
                 "echo $RANK $(sed -n 's/Cpus_allowed_list:\\s*//p' /proc/self/status) "
                 "$OMP_NUM_THREADS"));
  Lines expected;
  for (int rank = 0; rank < n_ranks; ++rank) {
    expected.push_back(
        fmt::format("{} {} 1", rank, cores[static_cast<std::size_t>(rank) % cores.size()]));
  }
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(sorted_lines_of(ended.out), expected);
  EXPECT_NE(ended.err.find(fmt::format("{} ranks share {} cores", n_ranks, cores.size())),
            std::string::npos)
      << ended.err;
}

TEST(RunRanksTest, bind_none) {
  const std::string allowed = "sed -n 's/Cpus_allowed_list:\\s*//p' /proc/self/status";
  const Ended ended = run(script({"-n", "2", "--bind", "none"}, allowed));
  const Lines lines = lines_of(ended.out);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0], lines[1]);
  if (allowed_cores().size() > 1) {
    EXPECT_NE(lines[0].find_first_of(",-"), std::string::npos);
  }
}

TEST(RunRanksTest, sixty_four_ranks) {
  const Ended ended = run(script({"-n", "64"}, "echo $RANK"));
  Lines expected;
  for (int rank = 0; rank < 64; ++rank) expected.push_back(std::to_string(rank));
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(sorted_lines_of(ended.out), expected);
}

TEST(RunRanksTest, five_hundred_and_twelve_ranks_under_a_low_file_limit) {
  const Ended ended = run(StartOptions{.arguments = script({"-n", "512"}, "ulimit -n"),
                                       .shell = "ulimit -S -n 256; exec \"$@\""});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(lines_of(ended.out), Lines(512, "256"));  // the ranks have the limit of before
}

TEST(RunRanksTest, ranks_get_the_callers_signal_state) {
  // The launcher blocks signals and ignores SIGPIPE for itself; a child must not inherit that.
  const Ended ended = run(script({"-n", "1"}, "grep -E '^Sig(Blk|Ign)' /proc/self/status"));
  EXPECT_EQ(ended.out, "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n");
}

}  // namespace
}  // namespace lockstep::test
