#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/expect.hpp"
#include "support/hosts.hpp"
#include "support/namespaces.hpp"

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

}  // namespace
}  // namespace lockstep::test
