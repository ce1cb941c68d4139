#include "support/hosts.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <ostream>

#include "support/expect.hpp"
#include "support/temporary_folder.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {

std::unique_ptr<Command> start_on_machine(int node, int n, const NodesJob& job) {
  StartOptions start{
      .arguments = {"run", "--nnodes", std::to_string(n), "--node-rank", std::to_string(node),
                    "--rdzv", Namespaces::address(0) + ":29400", "-n", std::to_string(job.n_ranks)},
      .variables = {{"LOCKSTEP_UCX", job.ucx}},
      .shell = Namespaces::shell_of(
          node,
          job.n_seconds_ahead.empty() ? 0 : job.n_seconds_ahead[static_cast<std::size_t>(node)]),
      .watchdog = job.watchdog};
  start.arguments.insert(start.arguments.end(), job.options.begin(), job.options.end());
  start.arguments.insert(start.arguments.end(), job.program.begin(), job.program.end());
  return std::make_unique<Command>(start);
}

std::vector<std::unique_ptr<Command>> start_on_machines(int n, const NodesJob& job) {
  std::vector<std::unique_ptr<Command>> nodes;
  for (int node = 0; node < n; ++node) nodes.push_back(start_on_machine(node, n, job));
  return nodes;
}

std::vector<Ended> wait_for(const std::vector<std::unique_ptr<Command>>& nodes) {
  std::vector<Ended> ends;
  for (const auto& node : nodes) ends.push_back(node->wait());
  for (const auto& node : nodes) node->expect_nothing_left();
  return ends;
}

std::vector<Ended> run_on_machines(int n, const NodesJob& job) {
  return wait_for(start_on_machines(n, job));
}

void expect_cut_cable_blames_the_other_machine(const std::string& program, const std::string& ucx) {
  constexpr int kRanks = 4;
  const TemporaryFolder folder;
  const auto file_of = [&](int rank, const char* suffix) {
    return folder / (std::to_string(rank) + suffix);
  };
  const auto have_all = [&](const char* suffix) {
    return wait_until([&] {
      int n = 0;
      for (int r = 0; r < kRanks; ++r) n += std::filesystem::exists(file_of(r, suffix)) ? 1 : 0;
      return n == kRanks;
    });
  };
  const auto nodes =
      start_on_machines(2, {.program = {program, "auto", folder.path()}, .ucx = ucx});
  ASSERT_TRUE(have_all(".ready"));
  Namespaces::cut(1);
  std::ofstream(folder / "go").close();
  ASSERT_TRUE(have_all(".said"));
  for (int r = 0; r < kRanks; ++r) {
    const std::string text = contents_of(file_of(r, ".said"));
    const int leader = r / 2 * 2;
    expect_contains(
        text, fmt::format("rank {} waited 2 s for rank {} of ranks 0, 2", leader, 2 - leader));
  }
  wait_for(nodes);
}

Mpi open_mpi(const std::string& module) {
  return {.name = "openmpi",
          .module = module,
          .line =
              "mpirun.openmpi --oversubscribe --bind-to none --mca mpi_yield_when_idle 0 "
              "--mca plm_rsh_agent {agent} --mca btl_tcp_if_include 10.77.0.0/24 "
              "--mca oob_tcp_if_include 10.77.0.0/24 -x LOCKSTEP_MPI -x ASAN_OPTIONS "
              "-H {machines} -n {n_ranks} {program}"};
}

Mpi mpich(const std::string& module) {
  return {.name = "mpich",
          .module = module,
          .line =
              "mpiexec.mpich -launcher ssh -launcher-exec {agent} -iface cable -hosts {machines} "
              "-n {n_ranks} {program}",
          .ends = false};
}

void PrintTo(const Mpi& mpi, std::ostream* out) { *out << mpi.name; }

Command start_by_mpirun(const Mpi& mpi, int n, const Namespaces& machines,
                        const TemporaryFolder& folder, const std::string& program,
                        std::chrono::seconds watchdog) {
  machines.write_agent(folder / "agent");
  const std::string line = fmt::format(fmt::runtime(mpi.line), fmt::arg("agent", folder / "agent"),
                                       fmt::arg("machines", machines.addresses(":2")),
                                       fmt::arg("n_ranks", 2 * n), fmt::arg("program", program));
  return Command(StartOptions{.variables = {{"ASAN_OPTIONS", "detect_leaks=0"},
                                            {"LOCKSTEP_MPI", mpi.module},
                                            // Namespaces of one kernel are one host to UCX, which
                                            // would call others on this one's loopback.
                                            {"UCX_NET_DEVICES", "cable"},
                                            {"UCX_TLS", "tcp,self"},
                                            {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                            {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}},
                              .shell = "set -- " + line + "; " + Namespaces::shell_of(0),
                              .watchdog = watchdog});
}

HostsSaid read_hosts(const Ended& ended) {
  EXPECT_EQ(ended.exit_code, 0) << ended.out << ended.err;
  HostsSaid said;
  char name[64] = "";
  EXPECT_EQ(std::sscanf(ended.out.c_str(), "%63s sum %d local %d of %d sent %lf", name, &said.sum,
                        &said.n_local, &said.n_ranks, &said.n_sent),
            5)
      << ended.out << ended.err;
  std::printf("%s", ended.out.c_str());
  said.backend = name;
  return said;
}

void expect_once_per_host(const HostsSaid& hierarchical, const HostsSaid& flat, int n_hosts) {
  EXPECT_EQ(hierarchical.backend, "hierarchical");
  EXPECT_NE(flat.backend, "hierarchical");
  const int n_ranks = 2 * n_hosts;
  for (const HostsSaid& said : {hierarchical, flat}) {
    EXPECT_EQ(said.sum, static_cast<int>(std::pow(n_ranks, 4)));  // the sum of a sum, four times
    EXPECT_EQ(said.n_local, 2);
    EXPECT_EQ(said.n_ranks, n_ranks);
  }
  // A rank on each host sends all but its own slice, of the sum and of the result; TCP headers and
  // load imbalance add to that.
  const double least = 2.0 * (n_hosts - 1) / n_hosts;
  EXPECT_GT(hierarchical.n_sent, 0.95 * least);
  EXPECT_LT(hierarchical.n_sent, 1.15 * least);
  EXPECT_GT(flat.n_sent, 1.7 * least);
}

}  // namespace lockstep::test
