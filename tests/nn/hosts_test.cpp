#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/hosts.hpp"
#include "support/namespaces.hpp"

// Machines of two ranks each, started by `lockstep run --nnodes`: Gloo between them.
namespace lockstep::test {
namespace {

/// Ends of the machines' `lockstep run`, in their order.
std::vector<Ended> run_on_machines(int n, const std::vector<std::string>& program) {
  std::vector<std::unique_ptr<Command>> nodes;
  for (int node = 0; node < n; ++node) {
    StartOptions start{
        .arguments = {"run", "--nnodes", std::to_string(n), "--node-rank", std::to_string(node),
                      "--rdzv", Namespaces::address(0) + ":29400", "-n", "2"},
        .shell = Namespaces::shell_of(node)};
    start.arguments.insert(start.arguments.end(), program.begin(), program.end());
    nodes.push_back(std::make_unique<Command>(start));
  }
  std::vector<Ended> ends;
  for (const auto& node : nodes) ends.push_back(node->wait());
  for (const auto& node : nodes) node->expect_nothing_left();
  return ends;
}

TEST(HostsTest, hierarchical_over_gloo_sends_once_per_host) {
  for (const int n : {2, 3}) {
    const Namespaces machines(n, "400mbit");
    if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
    expect_once_per_host(read_hosts(run_on_machines(n, {HOSTS_PROGRAM, "auto"})[0]),
                         read_hosts(run_on_machines(n, {HOSTS_PROGRAM, "gloo"})[0]), n);
  }
}

TEST(HostsTest, one_program_over_two_machines) {
  const Namespaces machines(2);
  if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
  const std::vector<Ended> ends = run_on_machines(2, {EVALUATE_PROGRAM});
  for (const Ended& ended : ends) EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_EQ(ends[0].out + ends[1].out,
            "items 1001, sum 333833500, mean 333500.000, largest 1000000, agreed, in order\n");
  EXPECT_NE(ends[1].err.find("rank 3 of 4, local 1 of 2, by lockstep run, over hierarchical"),
            std::string::npos)
      << ends[1].err;
}

}  // namespace
}  // namespace lockstep::test
