#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

/// missing: no job can run so.
enum class State { good, note, missing };

/// One line of the report.
struct Finding {
  std::string name;  ///< "cores", "engine shared", ...: no two are alike
  State state;
  std::string text;         ///< what there is
  std::string advice = {};  ///< what to do about it; empty where there is nothing
};

using Findings = std::vector<Finding>;

/// Kernel, SIMD, cores, memory, limits and what shared memory needs. n_ranks: as many as are to run
/// here.
Findings check_machine(int n_ranks);
/// MPI libraries and the libtorch layer.
Findings check_libraries();
/// The launcher's variables, what init_dist makes of them, and each engine: can it serve that
/// world, or, without a launcher, n_ranks that `lockstep run` starts.
Findings check_job(int n_ranks);

/// What the engines that need no launcher compute, against the kernels' scalar reference.
Findings check_operations();
/// The same over the world that the launcher's variables describe, and one engine of it or "auto".
/// Collective. Returns the exit code.
int doctor_operations(const std::string& engine);

}  // namespace lockstep::cli
