#pragma once

#include <chrono>
#include <concepts>
#include <functional>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>

#include <lockstep/group.hpp>
#include <lockstep/types.hpp>

namespace lockstep {

/// What started the ranks of this program. `infer` detects it from the environment.
enum class Launcher { infer, none, lockstep, pytorch, slurm, mpi };

/// "lockstep run", "torchrun", ... as in errors.
std::string_view name_of(Launcher launcher);

/// What init_dist would otherwise choose itself.
struct InitOptions {
  Launcher launcher = Launcher::infer;
  std::string backend = "auto";  ///< auto|solo|shared|mpi|ucx|hierarchical|gloo|nccl
  /// Of one operation; if not given, LOCKSTEP_TIMEOUT, or else 5 minutes.
  std::optional<std::chrono::milliseconds> timeout{};
};

/// Joins the world that a launcher started and makes it the default group of every thread of this
/// process; without a launcher, or with Launcher::none, the solo group. Collective over the world.
/// Throws UsageError (already initialised, unknown backend, timeout not positive, contradictory
/// environment), EngineError (the backend is not available), MismatchError (the ranks' processors
/// have different floating-point settings), and what any collective throws.
/// Afterwards, if a rank terminates by an uncaught exception, its peers get PeerFailed with its
/// text: init_dist installs a std::terminate handler, which then calls the previous handler.
/// The world ends with destroy_dist or the program. A forked child is not a rank: its calls on the
/// world throw UsageError, and neither its destroy_dist nor its exit leaves the world.
/// Threads: call it from one thread. A group takes one call at a time, so each thread that
/// communicates needs its own group (Group::duplicate).
void init_dist(const InitOptions& options = {},
               std::source_location where = std::source_location::current());

/// Leaves the world after this rank's pending asynchronous calls, detached ones included, have
/// completed (each has its own timeout); does not wait for peers otherwise. Peers that make further
/// calls get PeerLost. If `failure` is not empty (why this rank cannot continue), or during
/// exception unwinding, they get PeerFailed at once, and so do this rank's pending calls. Does
/// nothing if not initialised. On a thread of run_ranks that rank leaves, and the thread has the
/// solo group from then on. Throws UsageError on another thread while run_ranks is running.
void destroy_dist(std::string_view failure = {},
                  std::source_location where = std::source_location::current());

/// none if the environment shows no launcher. Throws UsageError if variables contradict each other.
Launcher infer_launcher();

/// Whether this process is a rank (init_dist) or runs ranks (run_ranks); false on a thread of a
/// rank that has left by destroy_dist.
bool is_distributed();

/// The group of this thread's innermost GroupScope, if any; else the world: that of run_ranks if
/// this thread is one of its ranks, else that of init_dist (on every thread of the process); else
/// the solo group. The reference is valid until destroy_dist or the end of the scope; copy the
/// Group to keep it.
/// Throws UsageError on a thread that belongs to no rank while run_ranks is running, and if the
/// environment describes a world of more than one rank but init_dist was never called.
const Group& default_group(std::source_location where = std::source_location::current());
/// The world's ranks on this host. Throws as default_group; a GroupScope does not change it.
const Group& local_group(std::source_location where = std::source_location::current());

/// The optional arguments of an operation that reduces, by name in place of their positions:
///
///     all_reduce(values, {.op = ReduceOp::max, .timeout = 5s});
///     reduce(values, /*dst=*/0, {.group = row});
struct CallOptions {
  ReduceOp op = ReduceOp::sum;
  std::optional<Group> group{};  ///< unset: the default group at the time of the call
  Timeout timeout{};             ///< unset: the group's
};

namespace detail {
inline const Group& group_of(const CallOptions& options, std::source_location where) {
  return options.group ? *options.group : default_group(where);
}
}  // namespace detail

/// Makes `group` the default group of the calling thread during its lifetime. For threads that a
/// rank of run_ranks starts, and for code that has no group parameter. Scopes nest.
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

/// A rank, and the number of ranks of its group.
struct DistInfo {
  int rank;
  int world_size;
};

/// Rank in a group and size of the group; get_local_*: those of local_group().
int get_rank(const Group& group = default_group());
int get_world_size(const Group& group = default_group());
DistInfo get_dist_info(const Group& group = default_group());
int get_local_rank(std::source_location where = std::source_location::current());
int get_local_size(std::source_location where = std::source_location::current());
/// "shared", "mpi", ...; nullopt if not distributed.
std::optional<std::string> get_backend(const Group& group = default_group());
/// Whether this is rank 0 of the group.
bool is_main_process(const Group& group = default_group());

/// Of run_ranks.
struct RunRanksOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  ///< of one operation
};

/// Runs body(rank) as n ranks on n new threads of this process, each with its own default group,
/// and joins them. Rethrows the lowest rank's exception that is not a mere consequence of another's
/// (PeerFailed, PeerLost). Throws UsageError if n < 1, SystemError if out of memory or threads.
void run_ranks(int n, const std::function<void(int rank)>& body,
               const RunRanksOptions& options = {},
               std::source_location where = std::source_location::current());

/// The same for a body without arguments.
template <std::invocable F>
void run_ranks(int n, F body, const RunRanksOptions& options = {},
               std::source_location where = std::source_location::current()) {
  run_ranks(n, std::function<void(int)>([&body](int) { body(); }), options, where);
}

}  // namespace lockstep
