#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/free_port.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {

/// Three ranks of which rank 1 goes silent, while the others wait for it.
class TopTest : public testing::Test {
 protected:
  void SetUp() override {
    job_.read_until("joined", 3);
    const std::regex of_rank_1(R"(rank 1 is pid (\d+)\.)");
    std::smatch match;
    ASSERT_TRUE(std::regex_search(job_.out(), match, of_rank_1)) << job_.out();
    silent_ = std::stoi(match[1].str());
  }

  std::string number() const { return std::to_string(job_.pid()); }
  static Ended top(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "top");
    Command command(StartOptions{.arguments = std::move(arguments)});
    return command.wait();
  }
  /// What top says when the other ranks are waiting.
  nlohmann::json waiting() const {
    while (true) {
      const Ended ended = top({number(), "--json"});
      EXPECT_EQ(ended.exit_code, 0) << ended.err;
      auto json = nlohmann::json::parse(ended.out);
      if (ended.exit_code != 0 || !json["ranks"][0]["waits_for"].empty()) return json;
    }
  }

  Command job_{StartOptions{.arguments = {"run", "-n", "3", COLLECTIVES_PROGRAM, "lose", "1"}}};
  pid_t silent_ = -1;
};

TEST_F(TopTest, shows_who_waits_for_whom) {
  const auto json = waiting();
  EXPECT_EQ(json["job"], job_.pid());
  ASSERT_EQ(json["ranks"].size(), 3U);
  for (const int rank : {0, 2}) {
    const auto& row = json["ranks"][static_cast<std::size_t>(rank)];
    EXPECT_EQ(row["rank"], rank);
    EXPECT_EQ(row["waits_for"], nlohmann::json::array({1})) << row;
    EXPECT_EQ(row["current"]["operation"], "all_reduce");
    EXPECT_EQ(row["current"]["sequence"], 2);
    EXPECT_TRUE(row["current"]["where"].get<std::string>().starts_with("collectives.cpp:"));
    EXPECT_GT(row["memory_bytes"], 0);
  }
  const auto& silent = json["ranks"][1];
  EXPECT_EQ(silent["pid"], silent_);
  EXPECT_TRUE(silent["current"].is_null());
  EXPECT_EQ(silent["last"]["sequence"], 1);
  kill(silent_, SIGSTOP);
  EXPECT_EQ(waiting()["ranks"][1]["state"], "stopped");
}

TEST_F(TopTest, takes_any_rank_for_the_job_and_prints_a_table) {
  waiting();
  const Ended ended = top({std::to_string(silent_), "--once"});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  const auto lines = lines_of(ended.out);
  ASSERT_EQ(lines.size(), 5U) << ended.out;
  EXPECT_TRUE(contains(lines[0], "job " + number() + ": 3 ranks: ")) << lines[0];
  EXPECT_TRUE(contains(lines[2], "all_reduce #2, 1 i64, collectives.cpp:")) << lines[2];
  EXPECT_TRUE(contains(lines[2], ", waits for 1")) << lines[2];
  EXPECT_TRUE(contains(lines[3], "idle for ")) << lines[3];
}

TEST_F(TopTest, is_one_job_where_the_ranks_met_without_our_launcher) {
  const FreePort port;
  const std::string variables =
      std::string("for r in 0 1; do RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 ") +
      "MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(port.number()) +
      " " COLLECTIVES_PROGRAM " lose 1 & done; wait";
  Command ranks(StartOptions{.shell = variables});
  ranks.read_until("joined", 2);
  const std::regex of_rank(R"(rank \d is pid (\d+)\.)");
  std::vector<int> pids;
  for (std::sregex_iterator i(ranks.out().begin(), ranks.out().end(), of_rank), end; i != end;
       ++i) {
    pids.push_back(std::stoi((*i)[1].str()));
  }
  ASSERT_EQ(pids.size(), 2U) << ranks.out();
  const Ended ended = top({});
  EXPECT_EQ(ended.exit_code, 2);
  int n_listed = 0;
  for (const int pid : pids) {
    if (contains(ended.err, "lockstep top " + std::to_string(pid) + " ")) ++n_listed;
  }
  EXPECT_EQ(n_listed, 1) << ended.err;
}

TEST_F(TopTest, lists_the_jobs_where_there_are_several) {
  Command other(StartOptions{.arguments = {"run", "-n", "1", COLLECTIVES_PROGRAM, "lose", "0"}});
  other.read_until("joined", 1);
  const Ended ended = top({});
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.err, "choose one")) << ended.err;
  EXPECT_TRUE(contains(ended.err, "lockstep top " + number() + " ")) << ended.err;
  EXPECT_TRUE(contains(ended.err, "lockstep top " + std::to_string(other.pid()) + " "))
      << ended.err;
}

TEST_F(TopTest, sees_states_but_no_times_of_another_time_namespace) {
  Command other(StartOptions{.arguments = {"top", number(), "--once"},
                             .shell = "exec unshare --time --monotonic 50000 --boottime 70000 "
                                      "--fork --kill-child -- \"$@\""});
  const Ended ended = other.wait();
  if (ended.exit_code != 0) GTEST_SKIP() << "no time namespace: " << ended.err;
  EXPECT_TRUE(contains(ended.out, "sleeping")) << ended.out;
  EXPECT_FALSE(contains(ended.out, "dead")) << ended.out;
  EXPECT_TRUE(contains(ended.out, "all_reduce")) << ended.out;
  EXPECT_FALSE(contains(ended.out, " s, waits for ")) << ended.out;
}

TEST_F(TopTest, has_no_generation_where_nothing_keeps_the_world_running) {
  EXPECT_TRUE(waiting()["generation"].is_null());
  EXPECT_FALSE(contains(top({number(), "--once"}).out, "generation"));
}

TEST(TopOfElasticWorldTest, shows_the_newest_generation_for_every_process_of_the_job) {
  const TemporaryFolder folder;
  Command job(StartOptions{.arguments = {"run", "-n", "3", "--elastic", "2", ELASTIC_PROGRAM,
                                         "linger", folder / "file"}});
  job.read_until("lingers", 2);
  const std::regex of_replacement(R"(the replacement is pid (\d+)\.)");
  std::smatch match;
  ASSERT_TRUE(std::regex_search(job.out(), match, of_replacement)) << job.out();
  // The replacement has the segment of generation 1, in which it was started.
  for (const std::string& process : {std::to_string(job.pid()), match[1].str()}) {
    Command top(StartOptions{.arguments = {"top", process, "--json"}});
    const Ended ended = top.wait();
    ASSERT_EQ(ended.exit_code, 0) << ended.err;
    const auto json = nlohmann::json::parse(ended.out);
    EXPECT_EQ(json["job"], job.pid());
    EXPECT_EQ(json["generation"], 2);
    EXPECT_EQ(json["ranks"].size(), 2U);
  }
  Command top(StartOptions{.arguments = {"top", std::to_string(job.pid()), "--once"}});
  const Ended ended = top.wait();
  EXPECT_TRUE(contains(ended.out, ": 2 ranks, generation 2: ")) << ended.out;
}

TEST(TopOfFailedCallTest, says_that_it_failed_and_no_time) {
  Command job(StartOptions{.arguments = {"run", "-n", "3", COLLECTIVES_PROGRAM, "linger", "1"}});
  job.read_until("lingers", 2);
  Command top(StartOptions{.arguments = {"top", std::to_string(job.pid()), "--once"}});
  const Ended ended = top.wait();
  const auto lines = lines_of(ended.out);
  ASSERT_EQ(lines.size(), 5U) << ended.out;
  for (const std::size_t line : {2, 4}) {
    EXPECT_TRUE(contains(lines[line], "idle; last: barrier #2, collectives.cpp:")) << lines[line];
    EXPECT_TRUE(lines[line].ends_with(" (failed)")) << lines[line];
  }
  Command json(StartOptions{.arguments = {"top", std::to_string(job.pid()), "--json"}});
  const auto ranks = nlohmann::json::parse(json.wait().out)["ranks"];
  EXPECT_EQ(ranks[0]["last"]["failed"], true);
  EXPECT_EQ(ranks[1]["last"]["failed"], false);
}

TEST(TopOfContainersTest, cannot_tell_whether_a_rank_of_another_pid_namespace_lives) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can make a PID namespace";
  Command job(
      StartOptions{.arguments = {"run", "-n", "2", "unshare", "--pid", "--mount-proc", "--fork",
                                 "--kill-child", "--", COLLECTIVES_PROGRAM, "lose", "1"}});
  job.read_until("joined", 2);
  Command top(StartOptions{.arguments = {"top", std::to_string(job.pid()), "--json"}});
  const Ended ended = top.wait();
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  const auto json = nlohmann::json::parse(ended.out);
  for (const auto& row : json["ranks"]) {
    EXPECT_EQ(row["pid"], 1) << row;  // in its own namespace; here it is another process
    EXPECT_EQ(row["state"], "unknown") << row;
    EXPECT_EQ(row["memory_bytes"], 0) << row;
  }
}

TEST_F(TopTest, redraws_in_place_and_ends_with_the_job) {
  Command screen(
      StartOptions{.arguments = {"top", number(), "--interval", "0.1"}, .terminal = true});
  screen.read_until("all_reduce #2, 1 i64, collectives.cpp:", 1);  // on 80 columns
  screen.read_until("\x1b[5A", 1);  // up over the three ranks and the two lines above them
  kill(silent_, SIGKILL);
  const Ended ended = screen.wait();
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_TRUE(contains(ended.out, "job " + number() + " has ended")) << ended.out;
}

TEST_F(TopTest, never_writes_to_the_segment) {
  // The descriptor it opens is for reading only, so the kernel would refuse.
  Command screen(
      StartOptions{.arguments = {"top", number(), "--interval", "0.1"}, .terminal = true});
  screen.read_until("rank", 1);
  const std::string maps = contents_of("/proc/" + std::to_string(screen.pid()) + "/maps");
  EXPECT_TRUE(std::regex_search(maps, std::regex(R"( r--s .*memfd:lockstep)"))) << maps;
  EXPECT_FALSE(std::regex_search(maps, std::regex(R"( rw.s .*memfd:lockstep)"))) << maps;
  screen.send(SIGINT);
}

TEST_F(TopTest, another_users_job_is_rejected) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const std::string command = std::string("exec setpriv --reuid 65534 --clear-groups \"$@\"");
  Command other(StartOptions{.arguments = {"top", number()}, .shell = command});
  const Ended ended = other.wait();
  EXPECT_EQ(ended.exit_code, 2) << ended.out;
  EXPECT_TRUE(contains(ended.err, "belongs to user 0, you are user 65534")) << ended.err;
}

TEST(TopUsageTest, rejects_what_is_no_job) {
  const auto expect_refused = [](const std::string& argument, const std::string& why) {
    Command command(StartOptions{.arguments = {"top", argument}});
    const Ended ended = command.wait();
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_TRUE(contains(ended.err, why)) << ended.err;
  };
  expect_refused(std::to_string(getpid()), "belongs to no running job");
  expect_refused("4194305", "there is no process 4194305");
  expect_refused("x", "lockstep top: ");
  expect_refused("-1", "lockstep top: ");
  expect_refused("0", "got '0', expected a process number from 1 to 2147483647");
}

}  // namespace
}  // namespace lockstep::test
