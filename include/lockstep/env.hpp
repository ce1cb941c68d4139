#pragma once

#include <chrono>
#include <lockstep/engine.hpp>
#include <optional>
#include <string>

namespace lockstep {

/// Every LOCKSTEP_* variable, read once by init_dist or run_ranks. An invalid value is a UsageError
/// that names the variable, its value and the valid values.
struct Env {
  /// LOCKSTEP_SEGMENT: set by `lockstep run` for its ranks. "fd:nonce": the inherited file
  /// descriptor of the world's shared-memory segment, and the job's nonce of 16 hexadecimal digits,
  /// which is also stored in the segment.
  std::optional<std::string> segment;
  /// LOCKSTEP_RESTART: set by `lockstep run`: how often it has restarted the ranks, initially 0
  /// (--max-restarts). Programs read it to resume from a checkpoint.
  int restart = 0;
  /// LOCKSTEP_TIMEOUT: limit of one operation in seconds (decimals allowed), if InitOptions has
  /// none.
  std::optional<std::chrono::milliseconds> timeout;
  /// LOCKSTEP_RECORD_DIR: an existing directory. When a group dies, each rank writes its last
  /// operations to rank-N.json there; `lockstep run` writes it for ranks that could not.
  /// `lockstep doctor --record DIR` reads these files.
  std::optional<std::string> record_dir;
  /// LOCKSTEP_TRACE: an existing directory, to which each rank (also of run_ranks) writes every
  /// call and TraceScope while it runs. Set by `lockstep run --trace FILE`, which merges them into
  /// one trace; with other launchers, use `lockstep trace merge FILE DIR`.
  std::optional<std::string> trace_dir;
  /// LOCKSTEP_SIMD: scalar|avx2|avx512: the widest SIMD kernels to use. For measurements.
  std::optional<std::string> simd;
  /// LOCKSTEP_MPI: openmpi|mpich|PATH: the module of the mpi engine, if the launcher's variables do
  /// not identify it. PATH contains a slash.
  std::optional<std::string> mpi;
  /// LOCKSTEP_UCX: PATH|off: the module of the ucx engine, or that there is none. PATH contains a
  /// slash. The same on all hosts; `lockstep run` reads it too.
  std::optional<std::string> ucx;
  /// LOCKSTEP_CHECK: off|light|full, the same on all ranks: what ranks compare of every collective
  /// before they use each other's data. light (default): operation, type, count, root and
  /// reduction. full: also the source line, to detect a barrier that only some ranks call and
  /// others would match with a later one; all ranks must then call each collective from the same
  /// line. off: nothing on mpi, gloo and nccl, where a mismatch then gives wrong data or a
  /// TimeoutError; the shared engine compares as for light, because that costs nothing there. See
  /// docs/mpi.md.
  Check check = Check::light;
  /// LOCKSTEP_TUNE: inline=BYTES,flat=BYTES,chunk=BYTES,inplace=BYTES, each of them optional: the
  /// sizes at which the shared engine changes its algorithm, instead of the measured defaults
  /// (docs/performance.md). `lockstep run` decides for the ranks of its host; under
  /// another launcher the first of them does.
  std::optional<std::string> tune;

  /// LOCKSTEP_NETWORK: accepted and ignored. It described the network between hosts, by which the
  /// engines between them chose algorithms; now one constant size does (docs/design/014).
  std::optional<std::string> network;

  /// The variables as they are now. Throws UsageError.
  static Env read();
};

}  // namespace lockstep
