#pragma once

#include <chrono>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>

#include <lockstep/group.hpp>

namespace lockstep {

/// Who started this program's ranks. `infer` looks at the environment.
enum class Launcher { infer, none, lockstep, pytorch, slurm, mpi };

std::string_view name_of(Launcher launcher);

struct InitOptions {
  Launcher launcher = Launcher::infer;
  std::string backend = "auto";  ///< auto|solo|shared|mpi|hierarchical|gloo|nccl
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  ///< of one operation
};

/// Joins the world that a launcher started and makes it this thread's default group; without a
/// launcher, the solo group. Collective over the world.
/// Throws UsageError (already initialised, unknown backend, contradictory environment),
/// EngineError (the backend cannot be had here), and what any collective throws.
/// From then on the peers of a rank that ends by an exception nobody catches get PeerFailed with
/// its text: a std::terminate handler tells them, then calls the one that was there before.
/// Threads: the default group belongs to the calling thread; hand other threads a Group.
void init_dist(const InitOptions& options = {},
               std::source_location where = std::source_location::current());

/// Leaves the world: waits for nobody. Peers that call on get PeerLost; where `failure` says why
/// this rank cannot go on, or an exception is unwinding the caller, PeerFailed. Does nothing when
/// not initialised.
void destroy_dist(std::string_view failure = {});

/// none when the environment shows no launcher. Throws UsageError where variables contradict.
Launcher infer_launcher();

/// Whether this thread's default group came from init_dist or run_ranks.
bool is_distributed();

/// The thread-local default group: the solo group when not distributed. The reference stays
/// valid until init_dist or destroy_dist on this thread; copy the Group to keep it.
const Group& default_group();
/// The ranks of the world on this host.
const Group& local_group();

struct DistInfo {
  int rank;
  int world_size;
};

int get_rank(const Group& group = default_group());
int get_world_size(const Group& group = default_group());
DistInfo get_dist_info(const Group& group = default_group());
int get_local_rank();
int get_local_size();
/// "shared", "mpi", ...; nullopt when not distributed.
std::optional<std::string> get_backend(const Group& group = default_group());
bool is_main_process(const Group& group = default_group());

}  // namespace lockstep
