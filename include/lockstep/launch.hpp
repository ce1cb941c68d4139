#pragma once

#include <chrono>
#include <concepts>
#include <functional>
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

/// Joins the world that a launcher started and makes it the default group of every thread of this
/// process; without a launcher, or with Launcher::none, the solo group. Collective over the world.
/// Throws UsageError (already initialised, unknown backend, timeout not positive, contradictory
/// environment), EngineError (the backend cannot be had here), MismatchError (the ranks' processors
/// are set to compute differently, see below), and what any collective throws.
/// From then on the peers of a rank that ends by an exception nobody catches get PeerFailed with
/// its text: a std::terminate handler tells them, then calls the one that was there before.
/// The world ends with destroy_dist or the program. A fork of this process is no rank: calls on the
/// world throw UsageError there, and it leaves nothing.
/// Threads: one calls it; the group takes one call at a time, so give each thread that communicates
/// its own (Group::duplicate).
void init_dist(const InitOptions& options = {},
               std::source_location where = std::source_location::current());

/// Leaves the world, once this rank's asynchronous calls under way have ended, detached ones too
/// (each has its limit); waits for no peer otherwise. Peers that call on get PeerLost; where
/// `failure` says why this rank cannot go on, or an exception is unwinding the caller, PeerFailed,
/// at once: the calls under way are not waited for then. Does nothing when not initialised. On a
/// rank's thread of run_ranks: that rank leaves, and the thread is alone from then on. Throws
/// UsageError on another thread while run_ranks is at work in the process.
void destroy_dist(std::string_view failure = {},
                  std::source_location where = std::source_location::current());

/// none when the environment shows no launcher. Throws UsageError where variables contradict.
Launcher infer_launcher();

/// Whether this process is a rank (init_dist), or has ranks (run_ranks); false on a thread whose
/// rank has left by destroy_dist.
bool is_distributed();

/// The group of this thread's GroupScope, if there is one; else the world: of run_ranks where this
/// thread is one of its ranks, else of init_dist, on every thread of the process; else the solo
/// group. The reference stays valid until destroy_dist or the end of the scope; copy the Group to
/// keep it.
/// Throws UsageError on a thread that is no rank's while run_ranks is at work in the process, and
/// where the environment describes a world of more than one rank but init_dist was never called.
const Group& default_group(std::source_location where = std::source_location::current());
/// The ranks of the world on this host. Throws as default_group; a GroupScope does not change it.
const Group& local_group(std::source_location where = std::source_location::current());

/// Makes `group` the default group of the calling thread while it lives. For threads that a rank of
/// run_ranks starts, and code that takes no group. Scopes nest.
class [[nodiscard]] GroupScope {
 public:
  explicit GroupScope(Group group);
  ~GroupScope();
  GroupScope(const GroupScope&) = delete;
  GroupScope& operator=(const GroupScope&) = delete;

 private:
  Group group_;
  const Group* before_;
};

struct DistInfo {
  int rank;
  int world_size;
};

int get_rank(const Group& group = default_group());
int get_world_size(const Group& group = default_group());
DistInfo get_dist_info(const Group& group = default_group());
int get_local_rank(std::source_location where = std::source_location::current());
int get_local_size(std::source_location where = std::source_location::current());
/// "shared", "mpi", ...; nullopt when not distributed.
std::optional<std::string> get_backend(const Group& group = default_group());
bool is_main_process(const Group& group = default_group());

struct RunRanksOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  ///< of one operation
};

/// Runs body(rank) as n ranks on n new threads of this process, each with its default group, and
/// joins them. Rethrows the first rank's exception that was no echo of another's (PeerFailed,
/// PeerLost). Throws UsageError where n < 1, SystemError where memory or threads lack.
void run_ranks(int n, const std::function<void(int rank)>& body,
               const RunRanksOptions& options = {},
               std::source_location where = std::source_location::current());

/// The same for a body without argument.
template <std::invocable F>
void run_ranks(int n, F body, const RunRanksOptions& options = {},
               std::source_location where = std::source_location::current()) {
  run_ranks(n, std::function<void(int)>([&body](int) { body(); }), options, where);
}

}  // namespace lockstep
