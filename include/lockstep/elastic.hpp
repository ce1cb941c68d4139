#pragma once

#include <cstdint>
#include <source_location>
#include <string>
#include <vector>

#include <lockstep/types.hpp>

/// Going on after a lost rank, under `lockstep run --elastic MIN[:MAX]`: the launcher keeps the
/// others running and replaces the lost one. On one host, or over UCX on several.
namespace lockstep {

/// A rank that a world has lost.
struct LostRank {
  int rank;                  ///< in its generation
  std::uint64_t generation;  ///< the world in which it was a rank; 0: the first
  std::string why;           ///< "was killed by signal 9 (SIGKILL)"
};

/// What this rank is in the next generation of its world.
struct Regrouped {
  int rank;
  int size;
  std::uint64_t generation;
  std::vector<LostRank> lost;  ///< since the generation in which this rank was last
  std::vector<int> joined;     ///< ranks that are new
};

/// Joins the next generation of the world, with the ranks that are left, in their order, and the
/// replacements that have started by then. Collective over the ranks of the present one that run.
/// Call it after PeerLost, PeerFailed or TimeoutError on any group; or on all ranks at the same
/// place of the program, to let replacements in (has_waiting_replacements()).
///
/// From then on default_group() is the new world, and every group of the former ones is dead: a
/// call throws PeerLost. Ranks keep their memory; whoever joined has none of it: send it to them.
///
/// `timeout`, by default the world's, counts from the first rank that calls it: one that has not
/// come by then is killed, and lost. Where no call has failed before, a barrier with the same limit
/// comes first. If ranks die meanwhile, the others go on without them. If
/// fewer than MIN are left, it waits for replacements.
///
/// Throws UsageError if `lockstep run --elastic` has not started this rank, on threads of
/// run_ranks, and before init_dist; EngineError if the launcher ends the job, because too few ranks
/// are left. Afterwards this process is in no world, and not alone either: default_group() throws
/// UsageError until destroy_dist.
/// Threads: no other thread of the rank is in a call or in backward.
Regrouped regroup(Timeout timeout = {},
                  std::source_location where = std::source_location::current());

/// Tells the launcher that this rank has completed a step. Call it after each: if three generations
/// in a row end by a loss or an error before a step was completed, the job ends, because the next
/// one would fail as they did; and the delay before a replacement, doubled each time, begins anew.
/// Does nothing if not elastic. Threads: any.
void step_done() noexcept;
[[deprecated("use step_done")]] inline void count_step() noexcept { step_done(); }

/// Whether a launcher keeps this world running: `lockstep run --elastic` has started this rank, and
/// it has joined the world. Then regroup() goes on after a loss.
bool is_elastic() noexcept;

/// Whether a replacement waits for the ranks to call regroup(). The ranks may see different
/// answers: reduce them (ReduceOp::max) before acting on one. false if not elastic.
bool has_waiting_replacements() noexcept;
[[deprecated("use has_waiting_replacements")]] inline bool replacements_wait() noexcept {
  return has_waiting_replacements();
}

}  // namespace lockstep
