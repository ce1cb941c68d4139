#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/namespaces.hpp"

// Two hosts of two ranks each: network namespaces with host names and IPC of their own, started by
// `lockstep run --nnodes 2`.
namespace lockstep::test {
namespace {

struct Said {
  std::string backend;
  int sum = 0;
  int n_local = 0;
  int n_ranks = 0;
  double n_sent = 0;  ///< how often an all_reduce's bytes left host 0
};

Said run_on_two_hosts(const Namespaces& /*there*/, const std::string& backend) {
  std::vector<std::unique_ptr<Command>> nodes;
  for (const int node : {0, 1}) {
    nodes.push_back(std::make_unique<Command>(
        StartOptions{.arguments = {"run", "--nnodes", "2", "--node-rank", std::to_string(node),
                                   "--rdzv", "10.77.0.1:29400", "-n", "2", HOSTS_PROGRAM, backend},
                     .shell = Namespaces::shell_of(node)}));
  }
  const Ended first = nodes[0]->wait();
  const Ended second = nodes[1]->wait();
  EXPECT_EQ(first.exit_code, 0) << first.out << first.err;
  EXPECT_EQ(second.exit_code, 0) << second.out << second.err;
  Said said;
  char name[64] = "";
  EXPECT_EQ(std::sscanf(first.out.c_str(), "%63s sum %d local %d of %d sent %lf", name, &said.sum,
                        &said.n_local, &said.n_ranks, &said.n_sent),
            5)
      << first.out;
  said.backend = name;
  return said;
}

TEST(HostsTest, auto_shares_memory_inside_hosts_and_sends_once_per_host) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make network namespaces";
  const Namespaces namespaces;
  if (!namespaces.is_there()) GTEST_SKIP() << "this system lets root make no network namespaces";
  const Said hierarchical = run_on_two_hosts(namespaces, "auto");
  EXPECT_EQ(hierarchical.backend, "hierarchical");
  const Said flat = run_on_two_hosts(namespaces, "gloo");
  EXPECT_EQ(flat.backend, "gloo");
  for (const Said& said : {hierarchical, flat}) {
    EXPECT_EQ(said.sum, 256);  // four times the sum of four ranks
    EXPECT_EQ(said.n_local, 2);
    EXPECT_EQ(said.n_ranks, 4);
  }
  // Of two hosts each sends its part of the sum, and of the result, once; TCP's headers besides.
  EXPECT_LT(hierarchical.n_sent, 1.1);
  EXPECT_GT(flat.n_sent, 1.5);
}

}  // namespace
}  // namespace lockstep::test
