#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "cli/command.hpp"
#include "cli/nodes.hpp"
#include "support/namespaces.hpp"
#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"

// Several machines: each `lockstep run` is a node. Here they are processes on loopback, or in
// network namespaces of their own.
namespace lockstep::test {
namespace {

using Lines = std::vector<std::string>;

constexpr const char* kWho =
    "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR";

TEST(RunNodesTest, ranks_of_all_nodes_have_the_variables_of_torchrun) {
  const std::string rendezvous = free_rendezvous();
  const std::string script =
      "echo $ROLE_RANK/$ROLE_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $TORCHELASTIC_RUN_ID";
  const auto first =
      start({.node_rank = 0, .rendezvous = rendezvous, .n_ranks = 1, .script = script});
  const auto second =
      start({.node_rank = 1, .rendezvous = rendezvous, .n_ranks = 1, .script = script});
  const std::string out = first->wait().out;
  ASSERT_TRUE(out.starts_with("0/2 0/2 ")) << out << first->err();
  EXPECT_EQ(second->wait().out, "1/2 1/2 " + out.substr(std::string("0/2 0/2 ").size()));
}

TEST(RunNodesTest, ranks_are_numbered_over_all_nodes) {
  const std::string rendezvous = free_rendezvous();
  const auto last =
      start({.n_nodes = 3, .node_rank = 2, .rendezvous = rendezvous, .n_ranks = 1, .script = kWho});
  const auto first =
      start({.n_nodes = 3, .node_rank = 0, .rendezvous = rendezvous, .n_ranks = 2, .script = kWho});
  const auto middle =
      start({.n_nodes = 3, .node_rank = 1, .rendezvous = rendezvous, .n_ranks = 3, .script = kWho});
  const Ended ended_first = first->wait();
  const Ended ended_middle = middle->wait();
  const Ended ended_last = last->wait();
  EXPECT_EQ(ended_first.exit_code, 0) << ended_first.err;
  EXPECT_EQ(ended_middle.exit_code, 0) << ended_middle.err;
  EXPECT_EQ(ended_last.exit_code, 0) << ended_last.err;
  EXPECT_EQ(sorted_lines_of(ended_first.out),
            (Lines{"0/6 0/2 0 127.0.0.1", "1/6 1/2 0 127.0.0.1"}));
  EXPECT_EQ(sorted_lines_of(ended_middle.out),
            (Lines{"2/6 0/3 1 127.0.0.1", "3/6 1/3 1 127.0.0.1", "4/6 2/3 1 127.0.0.1"}));
  EXPECT_EQ(sorted_lines_of(ended_last.out), (Lines{"5/6 0/1 2 127.0.0.1"}));
}

TEST(RunNodesTest, rank_of_another_node_reads_the_input_of_that_node) {
  const std::string rendezvous = free_rendezvous();
  const std::string script = "echo $RANK reads $(cat)";
  const auto first = start({.node_rank = 0,
                            .rendezvous = rendezvous,
                            .n_ranks = 1,
                            .script = script,
                            .options = {"--stdin", "1"},
                            .shell = "echo this one | \"$@\""});
  const auto second = start({.node_rank = 1,
                             .rendezvous = rendezvous,
                             .n_ranks = 1,
                             .script = script,
                             .options = {"--stdin", "1"},
                             .shell = "echo that one | \"$@\""});
  EXPECT_EQ(first->wait().out, "0 reads\n");
  EXPECT_EQ(second->wait().out, "1 reads that one\n");
}

TEST(RunNodesTest, ctrl_z_does_not_stop_one_node_of_several) {
  const std::string rendezvous = free_rendezvous();
  const std::string script = "echo begun; read x; sleep 1000";
  const auto first =
      start({.node_rank = 0, .rendezvous = rendezvous, .n_ranks = 1, .script = script});
  const auto second =
      start({.node_rank = 1, .rendezvous = rendezvous, .n_ranks = 1, .script = script});
  first->read_until("begun");
  first->send(SIGTSTP);
  first->read_until("SIGTSTP: not stopped, because the other nodes would take this one for lost");
  first->send(SIGTERM);
  EXPECT_EQ(first->wait().exit_code, 128 + SIGTERM);
  EXPECT_NE(second->wait().exit_code, 0);
}

TEST(RunNodesTest, a_rank_that_fails_ends_the_ranks_of_all_nodes) {
  const std::string script = "[ $RANK = 3 ] && exit 7; sleep 1000";
  const std::string rendezvous = free_rendezvous();
  std::vector<std::unique_ptr<Command>> nodes;
  for (const int node : {0, 1, 2}) {
    nodes.push_back(
        start({.n_nodes = 3, .node_rank = node, .rendezvous = rendezvous, .script = script}));
  }
  for (const auto& node : nodes) {
    const Ended ended = node->wait();
    EXPECT_EQ(ended.exit_code, 7) << ended.err;
    EXPECT_TRUE(contains(ended.err, "rank 3 (pid ")) << ended.err;
    EXPECT_TRUE(contains(ended.err, "exited with code 7")) << ended.err;
    node->expect_nothing_left();
  }
}

TEST(RunNodesTest, a_launcher_that_is_killed_ends_the_other_nodes) {
  for (const int victim : {0, 1}) {
    const std::string rendezvous = free_rendezvous();
    std::vector<std::unique_ptr<Command>> nodes;
    for (const int node : {0, 1}) {
      nodes.push_back(
          start({.node_rank = node, .rendezvous = rendezvous, .script = "echo ready; sleep 1000"}));
    }
    for (const auto& node : nodes) node->read_until("ready", 2);
    nodes[static_cast<std::size_t>(victim)]->send(SIGKILL);
    Command& other = *nodes[static_cast<std::size_t>(1 - victim)];
    const Ended ended = other.wait();
    EXPECT_EQ(ended.exit_code, 1) << ended.err;
    EXPECT_TRUE(contains(ended.err, fmt::format("node {} is lost", victim))) << ended.err;
    nodes[static_cast<std::size_t>(victim)]->wait();
    for (const auto& node : nodes) node->expect_nothing_left();
  }
}

TEST(RunNodesTest, a_node_that_is_done_still_ends_with_the_code_of_the_others) {
  const std::string rendezvous = free_rendezvous();
  const TemporaryFolder folder;
  const std::string go = folder / "go";
  const auto done = start({.node_rank = 0, .rendezvous = rendezvous, .script = "echo done"});
  const auto failing = start({.node_rank = 1,
                              .rendezvous = rendezvous,
                              .script = await_file(go) + "[ $RANK != 2 ] || exit 5"});
  done->read_until("done", 2);
  done->wait_for_processes(2);  // the launcher and its guard
  std::ofstream(go).flush();
  EXPECT_EQ(done->wait().exit_code, 5);
  EXPECT_EQ(failing->wait().exit_code, 5);
}

TEST(RunNodesTest, an_interrupt_ends_all_nodes_and_none_starts_again) {
  const std::string rendezvous = free_rendezvous();
  std::vector<std::unique_ptr<Command>> nodes;
  for (const int node : {0, 1}) {
    nodes.push_back(start({.node_rank = node,
                           .rendezvous = rendezvous,
                           .script = "echo ready; exec sleep 1000",
                           .options = {"--max-restarts", "3"}}));
  }
  for (const auto& node : nodes) node->read_until("ready", 2);
  nodes[1]->send(SIGINT);
  for (const auto& node : nodes) {
    const Ended ended = node->wait();
    EXPECT_EQ(ended.exit_code, 128 + SIGINT) << ended.err;
    EXPECT_FALSE(contains(ended.err, "restart 1")) << ended.err;
  }
}

TEST(RunNodesTest, an_interrupt_ends_the_wait_for_the_others) {
  for (const int node : {0, 1}) {
    const auto alone =
        start({.node_rank = node, .rendezvous = free_rendezvous(), .script = "true"});
    EXPECT_TRUE(wait_until_asleep(alone->pid()));
    alone->send(SIGINT);
    const Ended ended = alone->wait();
    EXPECT_TRUE(ended.exit_code == 128 + SIGINT || ended.signal == SIGINT) << ended.err;
  }
}

TEST(RunNodesTest, all_nodes_start_again_together) {
  const std::string script =
      "echo $RANK.$LOCKSTEP_RESTART; [ $LOCKSTEP_RESTART = 1 ] && exit 0; [ $RANK = 1 ] && exit 3; "
      "sleep 1000";
  const std::string rendezvous = free_rendezvous();
  std::vector<std::unique_ptr<Command>> nodes;
  for (const int node : {0, 1}) {
    nodes.push_back(start({.node_rank = node,
                           .rendezvous = rendezvous,
                           .n_ranks = 1,
                           .script = script,
                           .options = {"--max-restarts", "1"}}));
  }
  for (std::size_t node = 0; node < nodes.size(); ++node) {
    const Ended ended = nodes[node]->wait();
    EXPECT_EQ(ended.exit_code, 0) << ended.err;
    EXPECT_EQ(lines_of(ended.out), (Lines{fmt::format("{}.0", node), fmt::format("{}.1", node)}));
  }
}

TEST(RunNodesTest, missing_nodes) {
  const std::string rendezvous = free_rendezvous();
  std::vector<std::unique_ptr<Command>> nodes;
  for (const int node : {0, 2}) {
    nodes.push_back(start({.n_nodes = 4,
                           .node_rank = node,
                           .rendezvous = rendezvous,
                           .script = "true",
                           .timeout_s = node == 0 ? "5" : "60"}));
  }
  for (const auto& node : nodes) {
    const Ended ended = node->wait();
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_TRUE(contains(ended.err, "nodes 1, 3 of 4 did not connect to " + rendezvous))
        << ended.err;
  }
}

TEST(RunNodesTest, node_0_that_is_not_there_is_named_with_host_and_port) {
  const std::string rendezvous = free_rendezvous();
  const Ended ended =
      start({.node_rank = 1, .rendezvous = rendezvous, .script = "true", .timeout_s = "0.5"})
          ->wait();
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.err, "cannot reach node 0 at " + rendezvous +
                                      " within 0.5 s: "
                                      "Connection refused"))
      << ended.err;
}

TEST(RunNodesTest, nodes_that_disagree_are_rejected) {
  const TemporaryFolder folder;
  std::ofstream(folder / "secret") << "the secret of this job\n";
  const Lines secret{"--rdzv-secret", folder / "secret"};
  {
    const std::string rendezvous = free_rendezvous();
    const auto first = start({.n_nodes = 2,
                              .node_rank = 0,
                              .rendezvous = rendezvous,
                              .script = "true",
                              .options = secret});
    const auto other = start({.n_nodes = 3,
                              .node_rank = 1,
                              .rendezvous = rendezvous,
                              .script = "true",
                              .options = secret});
    for (Command* node : {first.get(), other.get()}) {
      const Ended ended = node->wait();
      EXPECT_EQ(ended.exit_code, 1);
      EXPECT_TRUE(contains(ended.err, rendezvous + " disagree: node 1 has --nnodes 3, node 0 has "
                                                   "--nnodes 2"))
          << ended.err;
    }
  }
  const std::string rendezvous = free_rendezvous();
  std::vector<std::unique_ptr<Command>> nodes;
  for (const int node : {0, 1, 1}) {
    nodes.push_back(start({.n_nodes = 3,
                           .node_rank = node,
                           .rendezvous = rendezvous,
                           .script = "true",
                           .options = secret}));
  }
  for (const auto& node : nodes) {
    const Ended ended = node->wait();
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_TRUE(contains(ended.err, "two launchers at " + rendezvous + " have --node-rank 1"))
        << ended.err;
  }
}

// Without a secret it may be a stranger: the others wait for one that agrees.
TEST(RunNodesTest, a_node_that_disagrees_may_come_again) {
  const std::string rendezvous = free_rendezvous();
  const auto node = [&](int n_nodes, int node_rank, const std::string& timeout_s = "60") {
    return start({.n_nodes = n_nodes,
                  .node_rank = node_rank,
                  .rendezvous = rendezvous,
                  .n_ranks = 1,
                  .script = "echo $RANK",
                  .timeout_s = timeout_s});
  };
  const std::string wrong = rendezvous + " disagree: node 1 has --nnodes 3, node 0 has --nnodes 2";
  const auto first = node(2, 0);
  const Ended mistyped = node(3, 1)->wait();
  EXPECT_EQ(mistyped.exit_code, 1);
  EXPECT_TRUE(contains(mistyped.err, wrong)) << mistyped.err;
  const auto second = node(2, 1);
  EXPECT_EQ(first->wait().out, "0\n") << first->err();
  EXPECT_EQ(second->wait().out, "1\n") << second->err();

  const auto lonely = node(2, 0, "4");
  EXPECT_EQ(node(3, 1)->wait().exit_code, 1);
  const Ended ended = lonely->wait();
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.err, "node 1 of 2 did not connect to " + rendezvous)) << ended.err;
  EXPECT_TRUE(contains(ended.err, "rejected: nodes at " + wrong)) << ended.err;
}

TEST(RunNodesTest, port_of_another_program) {
  const base::UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = loopback(0);
  socklen_t n_bytes = sizeof address;
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), n_bytes), 0);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &n_bytes), 0);
  ASSERT_EQ(::listen(listener.get(), 4), 0);
  const std::string rendezvous = fmt::format("127.0.0.1:{}", ntohs(address.sin_port));
  const auto node = start({.node_rank = 1, .rendezvous = rendezvous, .script = "true"});
  const base::UniqueFd connection(::accept(listener.get(), nullptr, nullptr));
  const std::string greeting = "SSH-2.0-OpenSSH_9.2\r\n";
  ASSERT_EQ(::send(connection.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(greeting.size()));
  const Ended ended = node->wait();
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.err, rendezvous + " answers, but not as `lockstep run")) << ended.err;

  // Conversely, node 0 cannot listen at a port that another program has.
  const Ended taken = start({.node_rank = 0, .rendezvous = rendezvous, .script = "true"})->wait();
  EXPECT_EQ(taken.exit_code, 1);
  EXPECT_TRUE(contains(taken.err, "node 0 cannot listen at " + rendezvous)) << taken.err;
}

TEST(RunNodesTest, ignores_foreign_connections) {
  const std::string rendezvous = free_rendezvous();
  const auto first = start({.node_rank = 0, .rendezvous = rendezvous, .script = "echo $RANK"});
  const int port = std::stoi(rendezvous.substr(rendezvous.find(':') + 1));
  const sockaddr_in address = loopback(port);
  base::UniqueFd stranger;
  do {
    stranger.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  } while (::connect(stranger.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) !=
           0);
  const std::string request = "GET / HTTP/1.0\r\n\r\n";
  ASSERT_EQ(::send(stranger.get(), request.data(), request.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(request.size()));
  const auto second = start({.node_rank = 1, .rendezvous = rendezvous, .script = "echo $RANK"});
  EXPECT_EQ(sorted_lines_of(first->wait().out), (Lines{"0", "1"}));
  EXPECT_EQ(sorted_lines_of(second->wait().out), (Lines{"2", "3"}));
}

TEST(RunNodesTest, random_bytes_at_the_port_do_not_disturb) {
  const std::string rendezvous = free_rendezvous();
  const auto first = start({.node_rank = 0, .rendezvous = rendezvous, .script = "echo $RANK"});
  std::mt19937 random(7);
  std::vector<base::UniqueFd> strangers;
  for (int i = 0; i < 300; ++i) {
    std::string bytes(random() % 2000, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    // Some know how a launcher begins, and one of them another protocol.
    if (i % 3 != 0) bytes.insert(0, std::string("lksnodes\3\0\0\0", 12));
    if (i == 1) bytes[8] = 77;
    strangers.push_back(connect_to(rendezvous));
    ::send(strangers.back().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (i % 2 == 0) strangers.pop_back();  // the others stay
  }
  for (int i = 0; i < 300; ++i) strangers.push_back(connect_to(rendezvous));  // who say nothing
  const auto second = start({.node_rank = 1, .rendezvous = rendezvous, .script = "echo $RANK"});
  const Ended ended = first->wait();
  EXPECT_EQ(sorted_lines_of(ended.out), (Lines{"0", "1"})) << ended.err;
  EXPECT_EQ(sorted_lines_of(second->wait().out), (Lines{"2", "3"}));
}

TEST(RunNodesTest, idle_connections_do_not_take_all_descriptors) {
  const std::string rendezvous = free_rendezvous();
  const auto first = start({.node_rank = 0,
                            .rendezvous = rendezvous,
                            .script = "echo $RANK",
                            .shell = "ulimit -n 100; exec \"$@\""});
  std::vector<base::UniqueFd> idle;
  for (int i = 0; i < 300; ++i) idle.push_back(connect_to(rendezvous));
  const auto second = start({.node_rank = 1, .rendezvous = rendezvous, .script = "echo $RANK"});
  const Ended ended = first->wait();
  EXPECT_EQ(sorted_lines_of(ended.out), (Lines{"0", "1"})) << ended.err;
  EXPECT_EQ(sorted_lines_of(second->wait().out), (Lines{"2", "3"}));
}

TEST(RunNodesTest, more_nodes_than_descriptors_is_reported_at_once) {
  const Ended ended = start({.n_nodes = 70,
                             .node_rank = 0,
                             .rendezvous = free_rendezvous(),
                             .n_ranks = 1,
                             .script = "true",
                             .timeout_s = "1",
                             .shell = "ulimit -n 68; exec \"$@\""})
                          ->wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.err, "1 rank and 70 nodes need 139 open files, and the limit is 68"))
      << ended.err;
}

TEST(RunNodesTest, rejects_nodes_without_secret) {
  const TemporaryFolder folder;
  const auto secret = [&](const std::string& text) -> std::vector<std::string> {
    const std::string path = fmt::format("{}/{}", folder.path(), text.substr(0, 3));
    std::ofstream(path) << text << '\n';
    return {"--rdzv-secret", path};
  };
  const std::string rendezvous = free_rendezvous();
  const auto node = [&](int node_rank, const std::vector<std::string>& options,
                        const std::string& timeout_s = "60") {
    return start({.node_rank = node_rank,
                  .rendezvous = rendezvous,
                  .script = "echo $RANK",
                  .timeout_s = timeout_s,
                  .options = options});
  };
  const std::string right = "the secret of this job";
  const auto first = node(0, secret(right));
  for (const auto& options : {std::vector<std::string>{}, secret("another secret of a job")}) {
    const Ended away = node(1, options)->wait();
    EXPECT_EQ(away.exit_code, 1);
    EXPECT_TRUE(
        contains(away.err, "node 1 connected to " + rendezvous + " with another --rdzv-secret"))
        << away.err;
  }
  const auto second = node(1, secret(right));
  EXPECT_EQ(sorted_lines_of(first->wait().out), (Lines{"0", "1"}));
  EXPECT_EQ(sorted_lines_of(second->wait().out), (Lines{"2", "3"}));

  // Node 0 names the node that it rejected if no other one came.
  const auto lonely = node(0, {}, "2");
  EXPECT_EQ(node(1, secret(right))->wait().exit_code, 1);
  const Ended ended = lonely->wait();
  EXPECT_TRUE(contains(ended.err, "rejected: node 1 connected to " + rendezvous)) << ended.err;

  for (const char* wrong : {"short",
                            "more than sixty-four bytes ......................... are too "
                            "many for a secret"}) {
    const Ended refused = node(0, secret(wrong))->wait();
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_TRUE(contains(refused.err, "bytes, expected 16 to 64")) << refused.err;
  }
  EXPECT_TRUE(
      contains(node(0, {"--rdzv-secret", "/no/file"})->wait().err, "cannot read '/no/file'"));
}

TEST(RunNodesTest, a_warning_does_not_end_the_wait_for_other_nodes) {
  const std::string rendezvous = free_rendezvous();
  const auto first = start({.node_rank = 0, .rendezvous = rendezvous, .script = "echo $RANK"});
  const base::UniqueFd stranger = connect_to(rendezvous);
  first->send(SIGUSR1);
  const auto second = start({.node_rank = 1, .rendezvous = rendezvous, .script = "echo $RANK"});
  EXPECT_EQ(sorted_lines_of(first->wait().out), (Lines{"0", "1"}));
  EXPECT_EQ(sorted_lines_of(second->wait().out), (Lines{"2", "3"}));
}

// Debian's /etc/hosts gives a machine's own name the address 127.0.1.1.
TEST(RunNodesTest, node_0_whose_own_name_is_a_loopback_address) {
  const Namespaces machines(2);
  if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
  const TemporaryFolder folder;
  std::ofstream(folder / "0") << "127.0.1.1 head\n";
  std::ofstream(folder / "1") << "10.77.0.1 head\n";
  std::vector<std::unique_ptr<Command>> nodes;
  for (const int node : {0, 1}) {
    const std::string mount = "mount --bind " + (folder / std::to_string(node)) + " /etc/hosts";
    nodes.push_back(start({.node_rank = node,
                           .rendezvous = "head:29400",
                           .script = kWho,
                           .shell = "set -- unshare -m sh -c '" + mount +
                                    " && exec \"$@\"' sh \"$@\"; " + Namespaces::shell_of(node)}));
  }
  const Ended first = nodes[0]->wait();
  const Ended second = nodes[1]->wait();
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_EQ(sorted_lines_of(first.out), (Lines{"0/4 0/2 0 head", "1/4 1/2 0 head"}));
  EXPECT_EQ(sorted_lines_of(second.out), (Lines{"2/4 0/2 1 head", "3/4 1/2 1 head"}));
}

TEST(RunNodesTest, a_host_that_is_another_machine_is_named) {
  const Namespaces machines(1);
  if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
  const TemporaryFolder folder;
  std::ofstream(folder / "hosts") << "10.77.0.99 elsewhere\n";
  const std::string mount = "mount --bind " + (folder / "hosts") + " /etc/hosts";
  for (const char* host : {"elsewhere", "10.77.0.99"}) {
    const Ended ended = start({.node_rank = 0,
                               .rendezvous = fmt::format("{}:29400", host),
                               .script = "true",
                               .timeout_s = "2",
                               .shell = "set -- unshare -m sh -c '" + mount +
                                        " && exec \"$@\"' sh \"$@\"; " + Namespaces::shell_of(0)})
                            ->wait();
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_TRUE(contains(ended.err, fmt::format("node 0 cannot listen at {}:29400", host)))
        << ended.err;
  }
}

TEST(RunNodesTest, options_of_nodes_without_nnodes_are_refused) {
  const std::vector<std::vector<std::string>> cases = {{"--rdzv", "127.0.0.1:29400"},
                                                       {"--rdzv-secret", "/no/file"},
                                                       {"--rdzv-timeout", "5"},
                                                       {"--node-rank", "0"}};
  for (const auto& options : cases) {
    std::vector<std::string> arguments = {"run"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    for (const char* word : {"-n", "1", "true"}) arguments.emplace_back(word);
    const Ended ended = Command({.arguments = arguments}).wait();
    EXPECT_EQ(ended.exit_code, 2) << options[0];
    EXPECT_TRUE(contains(ended.err, options[0] + " needs --nnodes")) << ended.err;
  }
}

TEST(RunNodesTest, one_node_may_be_said) {
  const Ended ended = start({.n_nodes = 1,
                             .node_rank = 0,
                             .rendezvous = free_rendezvous(),
                             .script = "echo $RANK/$WORLD_SIZE"})
                          ->wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(sorted_lines_of(ended.out), (Lines{"0/2", "1/2"}));
}

TEST(RunNodesTest, a_secret_that_is_not_a_regular_file_is_refused) {
  const TemporaryFolder folder;
  const std::string fifo = folder / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& path : {fifo, folder.path()}) {
    const Ended ended = start({.node_rank = 0,
                               .rendezvous = free_rendezvous(),
                               .script = "true",
                               .options = {"--rdzv-secret", path}})
                            ->wait();
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_TRUE(contains(ended.err, path + "': it is not a regular file")) << ended.err;
  }
}

TEST(RunNodesTest, options_that_are_wrong_are_named) {
  const auto refusal = [](std::vector<std::string> options) {
    options.insert(options.begin(), "run");
    for (const char* word : {"-n", "1", "true"}) options.emplace_back(word);
    const Ended ended = Command({.arguments = options}).wait();
    EXPECT_EQ(ended.exit_code, 2);
    return ended.err;
  };
  EXPECT_TRUE(contains(refusal({"--nnodes", "2"}), "--nnodes 2 needs --node-rank, from 0 to 1"));
  EXPECT_TRUE(contains(refusal({"--nnodes", "2", "--node-rank", "2", "--rdzv", "a:1"}),
                       "--node-rank is 2, but --nnodes is 2"));
  for (const char* wrong : {"", "host", "host:", ":29400", "host:0", "host:65536", "host:29400x"}) {
    EXPECT_TRUE(contains(refusal({"--nnodes", "2", "--node-rank", "1", "--rdzv", wrong}),
                         fmt::format("--rdzv is '{}', expected HOST:PORT", wrong)))
        << wrong;
  }
  EXPECT_TRUE(contains(refusal({"--nnodes", "2", "--node-rank", "1", "--rdzv", "no.invalid:1"}),
                       "--rdzv no.invalid:1: cannot find the host"));
}

TEST(RunNodesTest, over_two_network_namespaces) {
  const Namespaces machines(2);
  if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
  std::vector<std::unique_ptr<Command>> nodes;
  for (const int node : {0, 1}) {
    nodes.push_back(start({.node_rank = node,
                           .rendezvous = "10.77.0.1:29400",
                           .script = kWho,
                           .shell = Namespaces::shell_of(node)}));
  }
  const Ended first = nodes[0]->wait();
  const Ended second = nodes[1]->wait();
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_EQ(sorted_lines_of(first.out), (Lines{"0/4 0/2 0 10.77.0.1", "1/4 1/2 0 10.77.0.1"}));
  EXPECT_EQ(sorted_lines_of(second.out), (Lines{"2/4 0/2 1 10.77.0.1", "3/4 1/2 1 10.77.0.1"}));
}

TEST(RunNodesTest, a_failure_crosses_network_namespaces) {
  const Namespaces machines(2);
  if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
  std::vector<std::unique_ptr<Command>> nodes;
  for (const int node : {0, 1}) {
    nodes.push_back(start({.node_rank = node,
                           .rendezvous = "10.77.0.1:29400",
                           .script = "[ $RANK = 1 ] && exit 6; sleep 1000",
                           .shell = Namespaces::shell_of(node)}));
  }
  for (const auto& node : nodes) EXPECT_EQ(node->wait().exit_code, 6);
}

}  // namespace
}  // namespace lockstep::test
