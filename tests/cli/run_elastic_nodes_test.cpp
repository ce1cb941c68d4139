#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "cli/nodes.hpp"
#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"

// `lockstep run --elastic` over several nodes, here launchers on loopback with UCX between their
// ranks: what ElasticMembership decides on node 0 happens on all of them.
namespace lockstep::test {
namespace {

class RunElasticNodesTest : public testing::Test {
 protected:
  void SetUp() override {
    if (std::string(UCX_MODULE).empty()) GTEST_SKIP() << "built without UCX";
  }

  void start_job(std::vector<std::string> program, std::vector<int> n_ranks = {2, 2},
                 std::vector<std::string> options = {"--elastic", "1"}) {
    n_ranks_ = std::move(n_ranks);
    program_ = std::move(program);
    options_ = std::move(options);
    for (std::size_t node = 0; node < n_ranks_.size(); ++node) nodes_.push_back(start_node(node));
  }
  std::unique_ptr<Command> start_node(std::size_t node, int n_ranks = 0,
                                      const std::vector<std::string>& options = {}) {
    Node launcher{.n_nodes = static_cast<int>(n_ranks_.size()),
                  .node_rank = static_cast<int>(node),
                  .rendezvous = rendezvous_,
                  .n_ranks = n_ranks == 0 ? n_ranks_[node] : n_ranks,
                  .script = {},
                  .options = options.empty() ? options_ : options,
                  .program = {ELASTIC_PROGRAM},
                  .variables = {{"LOCKSTEP_UCX", UCX_MODULE}}};
    launcher.program.insert(launcher.program.end(), program_.begin(), program_.end());
    return start(launcher);
  }
  // Replacements may join one after another, so generations are told by their size, not by number.
  /// The ends of all launchers, of which nothing is left.
  std::vector<Ended> wait() {
    std::vector<Ended> ends;
    for (const auto& node : nodes_) ends.push_back(node->wait());
    for (const auto& node : nodes_) node->expect_nothing_left();
    return ends;
  }
  void expect_success(std::size_t n_done, int n_ranks) {
    std::size_t n = 0;
    for (const Ended& ended : wait()) {
      EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
      for (const std::string& line : lines_of(ended.out)) {
        n += contains(line, fmt::format("of {} is done", n_ranks)) ? 1 : 0;
      }
    }
    EXPECT_EQ(n, n_done);
  }
  /// A job that takes steps until it is told to end, with a lease of a second and a secret.
  void start_steps(int n_nodes, const std::string& limits = "1") {
    std::ofstream(secret_) << "the secret of this job\n";
    start_job({"until", end_}, std::vector<int>(static_cast<std::size_t>(n_nodes), 2),
              {"--elastic", limits, "--elastic-lease", "1", "--rdzv-secret", secret_});
    await_step();
  }
  void end_steps(int n_ranks) {
    std::ofstream(end_).close();
    expect_success(static_cast<std::size_t>(n_ranks), n_ranks);
  }
  /// Ranks say so at each 20th step.
  void await_step() { nodes_[0]->read_until("step 20 of"); }

  const TemporaryFolder folder_;
  const std::string end_ = folder_ / "end";
  const std::string secret_ = folder_ / "secret";
  const std::string rendezvous_ = free_rendezvous();
  std::vector<std::string> program_, options_;
  std::vector<int> n_ranks_;
  std::vector<std::unique_ptr<Command>> nodes_;
};

TEST_F(RunElasticNodesTest, however_ranks_are_lost) {
  for (const std::string how : {"kill", "exit", "throw", "stop"}) {
    for (const std::string places : {"1", "2,3", "0,1", "0,3", "0,2,3"}) {
      SCOPED_TRACE(fmt::format("{} {}", how, places));
      if (how != "kill" && places.size() != 3) continue;
      start_job({"steps", how, places});
      expect_success(4, 4);
      nodes_.clear();
    }
  }
}

TEST_F(RunElasticNodesTest, one_rank_on_each_node_and_uneven_ones) {
  for (const std::vector<int>& n_ranks : {std::vector{1, 1, 1}, {1, 3}, {2, 1}}) {
    start_job({"steps", "kill", "1"}, n_ranks);
    const int n = n_ranks[0] + n_ranks[1] + (n_ranks.size() > 2 ? n_ranks[2] : 0);
    expect_success(static_cast<std::size_t>(n), n);
    nodes_.clear();
  }
}

TEST_F(RunElasticNodesTest, lost_ranks_are_named_on_all_nodes) {
  start_job({"steps", "kill", "2"}, {2, 2}, {"--elastic", "2"});
  const auto ends = wait();
  for (const Ended& ended : ends) EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(contains(ends[0].out,
                       "generation 1: rank 0 of 3, lost: 0.2 was killed by signal 9 "
                       "(SIGKILL); joined: "))
      << ends[0].out;
  EXPECT_TRUE(contains(ends[1].out, "generation 1: rank 2 of 3, lost: 0.2 was killed"))
      << ends[1].out;
  EXPECT_TRUE(contains(ends[1].err, "rank 2 (pid ")) << ends[1].err;
}

TEST_F(RunElasticNodesTest, ranks_regroup_without_a_loss) {
  start_job({"boundary"}, {2, 1});
  int n = 0;
  for (const Ended& ended : wait()) {
    EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
    for (const auto& line : lines_of(ended.out))
      n += contains(line, "of 3, lost: joined: ") ? 1 : 0;
  }
  EXPECT_EQ(n, 60);
}

TEST_F(RunElasticNodesTest, too_few_ranks_end_the_job_on_all_nodes) {
  start_job({"refused"}, {2, 1}, {"--elastic", "3"});
  const auto ends = wait();
  for (const Ended& ended : ends) {
    EXPECT_EQ(ended.exit_code, 1) << ended.err;
    EXPECT_TRUE(contains(ended.err, "2 of at least 3 ranks are left; ending")) << ended.err;
    EXPECT_TRUE(contains(ended.out, "`lockstep run` ends the job: 2 of at least 3 ranks are left"))
        << ended.out;
  }
}

TEST_F(RunElasticNodesTest, a_rank_that_finished_is_not_replaced) {
  start_job({"steps", "finish", "2"});
  expect_success(3, 3);
}

TEST_F(RunElasticNodesTest, a_killed_launcher_is_a_lost_node_and_returns) {
  start_steps(3);
  nodes_[1]->send(SIGKILL);
  nodes_[1]->wait();
  nodes_[0]->read_until(": 4 ranks");
  EXPECT_TRUE(contains(nodes_[0]->err(), "node 1 (")) << nodes_[0]->err();
  EXPECT_TRUE(contains(nodes_[0]->err(), "is lost: its launcher was not heard for 1.2 s"));
  nodes_[1] = start_node(1);
  nodes_[0]->read_until(": 6 ranks");
  end_steps(6);
}

// Over UCX the others find a broken connection long before node 0 may call its node lost.
TEST_F(RunElasticNodesTest, ranks_wait_for_the_verdict_as_long_as_a_lease_lasts) {
  start_job({"until", end_}, {1, 1}, {"--elastic", "1", "--elastic-lease", "6"});
  await_step();
  nodes_[1]->send(SIGKILL);
  nodes_[0]->read_until(": 1 rank");
  nodes_.pop_back();
  end_steps(1);
}

TEST_F(RunElasticNodesTest, a_node_returns_where_the_others_wait_for_it_and_logs_go_on) {
  start_job({"until", end_}, {1, 1},
            {"--elastic", "2", "--elastic-lease", "1", "--log-dir", folder_ / "logs"});
  await_step();
  nodes_[1]->send(SIGSTOP);
  nodes_[0]->read_until("is lost");
  nodes_[1]->send(SIGCONT);
  nodes_[0]->read_until(": 2 ranks");
  end_steps(2);
}

// Longer than the lease, which ends with the job's.
TEST_F(RunElasticNodesTest, ranks_have_their_grace_when_the_job_is_ended) {
  const std::string slow =
      "trap 'sleep 3; echo tidied; exit 0' TERM; echo here; while :; do sleep 0.1; done";
  std::vector<std::unique_ptr<Command>> nodes;
  for (const int node : {0, 1}) {
    nodes.push_back(start({.node_rank = node,
                           .rendezvous = rendezvous_,
                           .n_ranks = 1,
                           .script = slow,
                           .options = {"--elastic", "1", "--elastic-lease", "1"},
                           .variables = {{"LOCKSTEP_UCX", UCX_MODULE}}}));
  }
  for (const auto& node : nodes) node->read_until("here");
  nodes[0]->send(SIGTERM);
  for (const auto& node : nodes) EXPECT_TRUE(contains(node->wait().out, "tidied")) << node->err();
}

// The launcher is stopped, not its ranks: the guard kills them before the others go on.
TEST_F(RunElasticNodesTest, a_stopped_launcher_loses_its_ranks_and_joins_again) {
  start_steps(2);
  nodes_[1]->send(SIGSTOP);
  nodes_[0]->read_until(": 2 ranks");
  // The launcher and its guard; the ranks are zombies, which the launcher reaps.
  for (const pid_t process : nodes_[1]->processes()) {
    const char state = thread_state(process);
    EXPECT_TRUE(process == nodes_[1]->pid() || state == 'Z' || state == 'S') << state;
  }
  nodes_[1]->send(SIGCONT);
  nodes_[0]->read_until(": 4 ranks");
  end_steps(4);
}

TEST_F(RunElasticNodesTest, a_guard_that_was_stopped_reads_the_newest_lease) {
  start_steps(2);
  pid_t guard = -1;
  for (const pid_t process : nodes_[1]->processes()) {
    std::string name;
    std::getline(std::ifstream(fmt::format("/proc/{}/comm", process)), name);
    if (name == "lockstep-guard") guard = process;
  }
  ASSERT_GT(guard, 0);
  ASSERT_EQ(::kill(guard, SIGSTOP), 0);
  nodes_[0]->read_until("step 400 of");  // of 5 ms at least: longer than the lease
  ASSERT_EQ(::kill(guard, SIGCONT), 0);
  nodes_[0]->read_until("step 500 of");
  EXPECT_FALSE(contains(nodes_[0]->err(), "generation 1")) << nodes_[0]->err();
  end_steps(4);
}

TEST_F(RunElasticNodesTest, the_loss_of_node_0_ends_the_job) {
  start_steps(3);
  nodes_[0]->send(SIGKILL);
  for (const std::size_t node : {1U, 2U}) {
    const Ended ended = nodes_[node]->wait();
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_TRUE(
        contains(ended.err, "node 0 is lost: its `lockstep run` at " + rendezvous_ + " has ended"))
        << ended.err;
    nodes_[node]->expect_nothing_left();
  }
}

TEST_F(RunElasticNodesTest, a_signal_to_another_launcher_takes_its_node_out) {
  start_steps(2);
  nodes_[1]->send(SIGTERM);
  EXPECT_EQ(nodes_[1]->wait().exit_code, 128 + SIGTERM);
  nodes_[0]->read_until(": 2 ranks");
  nodes_.pop_back();
  end_steps(2);
}

TEST_F(RunElasticNodesTest, a_signal_to_node_0_ends_the_job) {
  start_steps(2);
  nodes_[0]->send(SIGINT);
  for (const Ended& ended : wait()) EXPECT_EQ(ended.exit_code, 128 + SIGINT) << ended.err;
}

TEST_F(RunElasticNodesTest, a_node_that_returns_otherwise_is_rejected) {
  start_steps(2);
  const auto is_rejected = [&](const std::unique_ptr<Command>& launcher, const std::string& why) {
    const Ended ended = launcher->wait();
    EXPECT_NE(ended.exit_code, 0);
    EXPECT_TRUE(contains(ended.err, why)) << ended.err;
  };
  is_rejected(start_node(1, 3), "node 1 had 2 ranks, and returns to " + rendezvous_ + " with 3");
  is_rejected(start_node(1, 2, {"--elastic", "1", "--elastic-lease", "1"}),
              "node 1 connected to " + rendezvous_ + " with another --rdzv-secret than node 0");
  is_rejected(
      start_node(1, 2, {"--elastic", "2", "--elastic-lease", "1", "--rdzv-secret", secret_}),
      "node 1 has another --elastic or --elastic-lease than node 0");
  end_steps(4);
}

TEST_F(RunElasticNodesTest, wrong_options_are_refused) {
  const auto refusal = [](std::vector<std::string> options) {
    options.insert(options.end(), {"-n", "2", "true"});
    const Ended ended = run(options);
    EXPECT_EQ(ended.exit_code, 2);
    return ended.err;
  };
  const std::vector<std::string> nodes{"--nnodes", "2",           "--node-rank", "0",
                                       "--rdzv",   "127.0.0.1:1", "--elastic"};
  const auto with = [&](std::vector<std::string> options) {
    options.insert(options.begin(), nodes.begin(), nodes.end());
    return options;
  };
  EXPECT_TRUE(
      contains(refusal(with({"1", "--max-restarts", "1"})), "--max-restarts starts all ranks"));
  EXPECT_TRUE(contains(refusal(with({"3:2"})), "1 <= MIN <= MAX, ranks of all nodes together"));
  EXPECT_TRUE(contains(refusal({"--elastic-lease", "2"}), "it needs --elastic and --nnodes"));
}

TEST_F(RunElasticNodesTest, more_than_all_ranks_and_no_module_are_refused) {
  start_job({"boundary"}, {1, 1}, {"--elastic", "3"});
  const Ended ended = nodes_[0]->wait();
  EXPECT_NE(ended.exit_code, 0);
  EXPECT_TRUE(contains(ended.err, "--elastic is 3:2, but the nodes have 2 ranks")) << ended.err;
  nodes_.clear();
  const auto without = start({.rendezvous = rendezvous_,
                              .script = "true",
                              .options = {"--elastic", "1"},
                              .variables = {{"LOCKSTEP_UCX", "off"}}});
  EXPECT_TRUE(contains(without->wait().err, "needs the module liblockstep-ucx.so"));
}

}  // namespace
}  // namespace lockstep::test
