#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace lockstep {

/// Every LOCKSTEP_* variable, read once by init_dist. Throws UsageError naming the variable, its
/// value and what it may be.
struct Env {
  /// LOCKSTEP_SEGMENT: set by `lockstep run` for its ranks: "fd:nonce", the inherited descriptor
  /// of the world's shared segment and the job's 16 hexadecimal digits, which the segment holds
  /// too.
  std::optional<std::string> segment;
  /// LOCKSTEP_RESTART: set by `lockstep run`: how often it has started the ranks again, 0 at first
  /// (--max-restarts). Programs read it to go on from a checkpoint.
  int restart = 0;
  /// LOCKSTEP_TIMEOUT: limit of one operation in seconds (decimals allowed), over InitOptions.
  std::optional<std::chrono::milliseconds> timeout;
  /// LOCKSTEP_RECORD_DIR: an existing folder, into which each rank writes rank-N.json with its last
  /// operations when a group dies, and `lockstep run` for the ranks that could not.
  /// `lockstep doctor --record DIR` reads them.
  std::optional<std::string> record_dir;
  /// LOCKSTEP_TRACE: an existing folder, into which each rank, threads of run_ranks too, writes
  /// every call and TraceScope while it runs. Set by `lockstep run --trace FILE`, which makes a
  /// trace of it; after other launchers, `lockstep trace merge FILE DIR` does.
  std::optional<std::string> trace_dir;
  /// LOCKSTEP_SIMD: scalar|avx2|avx512: the widest kernels to use. For measurements.
  std::optional<std::string> simd;
  /// LOCKSTEP_MPI: openmpi|mpich|PATH: the module of the mpi engine, where the launcher's variables
  /// do not say it. PATH has a slash.
  std::optional<std::string> mpi;
  /// LOCKSTEP_CHECK: off|light|full, the same on all ranks: what ranks compare of every collective
  /// before they take each other's data. light, the default: operation, type, count, root and
  /// reduction. full: the source line too, so that a barrier only some ranks come to is not taken
  /// for a later one; each collective must then stand on one line for all ranks; init_dist checks
  /// the engine's operations too. off: nothing, on
  /// mpi, gloo and nccl, where ranks that differ then get wrong data or a TimeoutError; the shared
  /// engine, where it costs nothing, compares as for light. See docs/mpi.md.
  std::optional<std::string> check;

  /// LOCKSTEP_TUNE: flat=BYTES,chunk=BYTES,inplace=BYTES, each of them or none: where the shared
  /// engine changes its algorithm, instead of what was measured (docs/performance.md). The maker of
  /// a group decides for it.
  std::optional<std::string> tune;

  static Env read();
};

}  // namespace lockstep
