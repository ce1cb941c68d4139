#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/command.hpp"
#include "support/expect.hpp"
#include "support/hosts.hpp"
#include "support/namespaces.hpp"
#include "support/temporary_folder.hpp"

// Machines of two ranks each, started by the real mpirun of both MPIs: MPI between them. A script
// stands for ssh.
namespace lockstep::test {
namespace {

class MpiHostsTest : public ::testing::TestWithParam<Mpi> {
 protected:
  /// `n_lines`: what the ranks print in all.
  static Ended mpirun(int n, const Namespaces& machines, const std::string& program, int n_lines) {
    const TemporaryFolder folder;
    Command command = start_by_mpirun(GetParam(), n, machines, folder, program);
    if (!GetParam().ends) {
      command.read_until("\n", n_lines);
      return {.exit_code = 0, .out = command.out(), .err = command.err()};
    }
    const Ended ended = command.wait();
    command.expect_nothing_left();
    return ended;
  }
};

INSTANTIATE_TEST_SUITE_P(Libraries, MpiHostsTest,
                         ::testing::Values(open_mpi(OPENMPI_MODULE), mpich(MPICH_MODULE)),
                         [](const auto& mpi) { return mpi.param.name; });

TEST_P(MpiHostsTest, hierarchical_sends_once_per_host) {
  if (GetParam().module.empty()) GTEST_SKIP() << "built without " << GetParam().name;
  for (const int n : {2, 3}) {
    const Namespaces machines(n, "400mbit");
    if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
    expect_once_per_host(read_hosts(mpirun(n, machines, HOSTS_PROGRAM " auto", 1)),
                         read_hosts(mpirun(n, machines, HOSTS_PROGRAM " mpi", 1)), n);
  }
}

TEST_P(MpiHostsTest, one_program_over_two_machines) {
  if (GetParam().module.empty()) GTEST_SKIP() << "built without " << GetParam().name;
  const Namespaces machines(2);
  if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
  const Ended ended = mpirun(2, machines, EVALUATE_PROGRAM, 5);
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(ended.out,
            "items 1001, sum 333833500, mean 333500.000, largest 1000000, agreed, in order\n");
  expect_contains(ended.err, "rank 3 of 4, local 1 of 2, by mpirun, over hierarchical");
}

#ifdef C_OPERATIONS
TEST_P(MpiHostsTest, two_groups_of_the_c_interface_at_once_over_two_machines) {
  if (GetParam().module.empty()) GTEST_SKIP() << "built without " << GetParam().name;
  const Namespaces machines(2);
  if (!machines.missing().empty()) GTEST_SKIP() << machines.missing();
  const Ended ended = mpirun(2, machines, C_OPERATIONS " threads", 4);
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(sorted_lines_of(ended.out),
            (std::vector<std::string>{"rank 0: both groups", "rank 1: both groups",
                                      "rank 2: both groups", "rank 3: both groups"}))
      << ended.err;
}
#endif

// Machines of two ranks each, started by `lockstep run --nnodes`: UCX between them.
class UcxHostsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(UCX_MODULE).empty()) GTEST_SKIP() << "built without UCX";
    if (const auto why = missing_namespaces(); !why.empty()) GTEST_SKIP() << why;
  }
  static NodesJob job(std::vector<std::string> program) {
    return {.program = std::move(program), .ucx = UCX_MODULE};
  }
};

TEST_F(UcxHostsTest, hierarchical_sends_once_per_host) {
  for (const int n : {2, 3}) {
    const Namespaces machines(n, "400mbit");
    const auto said = [&](const char* engine) {
      return read_hosts(run_on_machines(n, job({HOSTS_PROGRAM, engine}))[0]);
    };
    expect_once_per_host(said("auto"), said("ucx"), n);
  }
}

TEST_F(UcxHostsTest, one_program_over_two_machines) {
  const Namespaces machines(2);
  const std::vector<Ended> ends = run_on_machines(2, job({EVALUATE_PROGRAM}));
  for (const Ended& ended : ends) EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_EQ(ends[0].out + ends[1].out,
            "items 1001, sum 333833500, mean 333500.000, largest 1000000, agreed, in order\n");
  expect_contains(ends[1].err, "rank 3 of 4, local 1 of 2, by lockstep run, over hierarchical");
}

TEST_F(UcxHostsTest, one_world_after_another) {
  const Namespaces machines(2);
  const std::vector<Ended> ends = run_on_machines(2, job({AGAIN_PROGRAM, "rounds", "3"}));
  for (const Ended& ended : ends) EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  for (const char* round : {"round 0", "round 1", "round 2"}) {
    expect_contains(ends[0].out, std::string(round) + ": rank 0 sum 10 hierarchical");
  }
  EXPECT_FALSE(contains(ends[0].out + ends[1].out, "leak")) << ends[0].out << ends[1].out;
}

#ifdef C_OPERATIONS
TEST_F(UcxHostsTest, two_groups_of_the_c_interface_at_once_over_two_machines) {
  const Namespaces machines(2);
  const std::vector<Ended> ends = run_on_machines(2, job({C_OPERATIONS, "threads"}));
  for (const Ended& ended : ends) EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  EXPECT_EQ(sorted_lines_of(ends[0].out + ends[1].out),
            (std::vector<std::string>{"rank 0: both groups", "rank 1: both groups",
                                      "rank 2: both groups", "rank 3: both groups"}));
}
#endif

TEST_F(UcxHostsTest, a_cut_cable_is_blamed_on_no_rank_of_the_own_host) {
  const Namespaces machines(2);
  expect_cut_cable_blames_the_other_machine(HOSTS_PROGRAM, UCX_MODULE);
}

// Whoever waits, on whichever machine, is told by its launcher which rank it was.
TEST_F(UcxHostsTest, a_killed_rank_is_named_on_every_machine) {
  for (const int killed : {0, 1, 2, 3}) {
    const Namespaces machines(2);
    const std::vector<Ended> ends =
        run_on_machines(2, job({COLLECTIVES_PROGRAM, "die", std::to_string(killed)}));
    int n_told = 0;
    for (const std::string& line : lines_of(ends[0].out + ends[1].out)) {
      if (!contains(line, "PeerLost: ")) continue;
      ++n_told;
      EXPECT_TRUE(contains(line, fmt::format("rank {} was killed by signal 9", killed)) ||
                  contains(line, fmt::format("rank {} (pid ", killed)))
          << line;
    }
    EXPECT_EQ(n_told, 3) << ends[0].out << ends[1].out;
    for (const Ended& ended : ends) EXPECT_EQ(ended.exit_code, 137) << ended.err;
  }
}

TEST_F(UcxHostsTest, a_rank_lost_before_it_joins_is_named) {
  const Namespaces machines(2);
  const std::vector<Ended> ends = run_on_machines(
      2, job({"sh", "-c", "[ $RANK = 3 ] && sleep 0.5 && kill -9 $$; exec " EVALUATE_PROGRAM}));
  expect_contains(ends[0].out, "rank 3 is gone: node 1: rank 3 (pid ");
  expect_contains(ends[1].out, "rank 3 is gone: was killed by SIGKILL");
}

TEST_F(UcxHostsTest, ranks_that_do_not_join_are_named) {
  const Namespaces machines(2);
  const std::vector<Ended> ends =
      run_on_machines(2, job({"sh", "-c",
                              "[ $RANK = 2 ] && exec sleep 3 || LOCKSTEP_TIMEOUT=1 "
                              "exec " EVALUATE_PROGRAM}));
  expect_contains(ends[0].out + ends[1].out, "rank 2 of 4 did not call init_dist within 1 s");
}

TEST_F(UcxHostsTest, nodes_of_which_one_has_no_module_are_refused) {
  const Namespaces machines(2);
  const TemporaryFolder folder;
  std::ofstream(folder / "secret") << "the secret of this job\n";
  std::vector<std::unique_ptr<Command>> nodes;
  for (const int node : {0, 1}) {
    nodes.push_back(std::make_unique<Command>(
        StartOptions{.arguments = {"run", "--nnodes", "2", "--node-rank", std::to_string(node),
                                   "--rdzv", Namespaces::address(0) + ":29400", "--rdzv-secret",
                                   folder / "secret", "-n", "1", "--", "true"},
                     .variables = {{"LOCKSTEP_UCX", node == 0 ? UCX_MODULE : "off"}},
                     .shell = Namespaces::shell_of(node)}));
  }
  for (const Ended& ended : wait_for(nodes)) {
    EXPECT_NE(ended.exit_code, 0);
    expect_contains(ended.err, "node 1 has no liblockstep-ucx.so, node 0 has it");
  }
}

TEST_F(UcxHostsTest, an_elastic_world_of_one_host_may_be_over_ucx) {
  Command command(
      StartOptions{.arguments = {"run", "-n", "2", "--elastic", "1", "--", HOSTS_PROGRAM, "ucx"},
                   .variables = {{"LOCKSTEP_UCX", UCX_MODULE}}});
  const Ended ended = command.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  expect_contains(ended.out, "ucx sum 16 local 2 of 2");
}

}  // namespace
}  // namespace lockstep::test
