#pragma once

#include <chrono>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "support/namespaces.hpp"
#include "support/temporary_folder.hpp"

// Jobs of some ranks on each of several machines, which are network namespaces.
namespace lockstep::test {

/// A job that one `lockstep run --nnodes` on each machine starts.
struct NodesJob {
  std::vector<std::string> program;
  std::vector<std::string> options = {};  ///< of `lockstep run`
  std::vector<int> n_seconds_ahead = {};  ///< each machine's clock; empty: that of the test
  std::chrono::seconds watchdog = StartOptions().watchdog;
  std::string ucx = "off";  ///< LOCKSTEP_UCX: off: Gloo between machines
  int n_ranks = 2;          ///< on each machine
};

/// Starts one of its n launchers, also after another has ended.
std::unique_ptr<Command> start_on_machine(int node, int n, const NodesJob& job);
/// Starts it on the first `n` machines.
std::vector<std::unique_ptr<Command>> start_on_machines(int n, const NodesJob& job);
/// Their ends, in their order; nothing may be left then.
std::vector<Ended> wait_for(const std::vector<std::unique_ptr<Command>>& nodes);
std::vector<Ended> run_on_machines(int n, const NodesJob& job);

/// Cuts the cable of the second of two machines, on which HOSTS_PROGRAM, `program`, waits in a
/// call: each rank says that the other machine's is late.
void expect_cut_cable_blames_the_other_machine(const std::string& program, const std::string& ucx);

/// An MPI, whose real mpirun starts a job: MPI between machines.
struct Mpi {
  std::string name;
  std::string module;  ///< path of its module of the mpi engine; empty: built without
  std::string line;    ///< how to start on MACHINES by AGENT
  /// MPICH 4.0.2 over UCX's TCP may not return from MPI_Finalize, in a program of ten lines without
  /// lockstep too: its end is not to be waited for.
  bool ends = true;
};

/// `module`: OPENMPI_MODULE, MPICH_MODULE.
Mpi open_mpi(const std::string& module);
Mpi mpich(const std::string& module);
void PrintTo(const Mpi& mpi, std::ostream* out);

/// Starts a program, with its arguments, on `n` machines. `folder`, which gets a substitute for
/// ssh, must outlive the command.
Command start_by_mpirun(const Mpi& mpi, int n, const Namespaces& machines,
                        const TemporaryFolder& folder, const std::string& program,
                        std::chrono::seconds watchdog = StartOptions().watchdog);

/// Output of rank 0 of programs/hosts.cpp.
struct HostsSaid {
  std::string backend;
  int sum = 0;
  int n_local = 0;
  int n_ranks = 0;
  double n_sent = 0;  ///< bytes sent by host 0 over the bytes of an all_reduce
};

HostsSaid read_hosts(const Ended& ended);

/// Fails unless each of `n_hosts` hosts of two ranks sent the traffic of one rank and, without
/// `hierarchical` on the same network, that of two.
void expect_once_per_host(const HostsSaid& hierarchical, const HostsSaid& flat, int n_hosts);

}  // namespace lockstep::test
