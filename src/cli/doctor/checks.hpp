#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

/// missing: no job can run on this machine.
enum class State { good, note, missing };

/// One line of the report.
struct Finding {
  std::string name;  ///< "cores", "engine shared", ...: unique
  State state;
  std::string text;         ///< what was found
  std::string advice = {};  ///< how to fix it; empty if nothing is wrong
};

using Findings = std::vector<Finding>;

/// Kernel, SIMD, cores, memory, limits and requirements of shared memory. n_ranks: number of ranks
/// to run here.
Findings check_machine(int n_ranks);
/// MPI libraries and the libtorch layer.
Findings check_libraries();
/// The launcher's variables, how init_dist interprets them, and whether each engine can serve that
/// world or, without a launcher, n_ranks started by `lockstep run`.
Findings check_job(int n_ranks);

/// Compares results of the engines that need no launcher with the kernels' scalar reference.
Findings check_operations();
/// The same over the world described by the launcher's variables, with one of its engines or
/// "auto". Collective. Returns the exit code.
int doctor_operations(const std::string& engine);

}  // namespace lockstep::cli
