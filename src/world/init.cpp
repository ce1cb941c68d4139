#include <atomic>
#include <chrono>
#include <exception>
#include <lockstep/error.hpp>
#include <lockstep/world.hpp>
#include <optional>
#include <utility>

#include "engines/catalog.hpp"
#include "engines/ucx/ucx.hpp"
#include "group/group_state.hpp"
#include "group/leave_on_exception.hpp"
#include "world/environment.hpp"
#include "world/session.hpp"
#include "world/settings.hpp"
#include "world/variables.hpp"

namespace lockstep {

namespace internal {

bool has_ucx() { return !ucx::find_module(variable("LOCKSTEP_UCX")).path.empty(); }

std::unique_ptr<Session> join_world(World world, std::string_view backend,
                                    const std::string& operation, std::chrono::milliseconds timeout,
                                    std::source_location where) {
  const Call barrier{.op = Op::barrier,
                     .check = world.env.check,
                     .group = "world",
                     .operation = operation,
                     .sequence = 1,
                     .timeout = timeout,
                     .where = where};
  while (true) {
    try {
      engines::JoinedEngine joined = engines::join(backend, world, barrier);
      const int host = leave_on_exception(*joined.engine, [&] {
        const int lowest = engines::find_host(*joined.engine, world, barrier);
        compare_settings(*joined.engine, barrier, /*was_member=*/world.last_generation >= 0);
        return lowest;
      });
      world.regrouped.rank = world.rank;
      world.regrouped.size = world.size;
      return std::make_unique<Session>(world, std::move(joined), timeout, where, host);
    } catch (const PeerLost&) {
      if (!world.is_elastic) throw;
    } catch (const PeerFailed&) {
      if (!world.is_elastic) throw;
    } catch (const TimeoutError&) {
      if (!world.is_elastic) throw;
    }
    // A rank of this generation ended before all had joined it, or does not fit, or has stopped:
    // then the launcher kills it, at the limit of this request.
  }
}

}  // namespace internal

void init_dist(const InitOptions& options, std::source_location where) {
  const ErrorContext context{.operation = "init_dist", .where = where};
  if (is_distributed() || internal::has_rank_threads()) {
    throw UsageError(context, internal::has_rank_threads()
                                  ? "threads of this process are ranks of run_ranks; their world "
                                    "is the default group there"
                                  : "this process already belongs to a world, on all its threads; "
                                    "call destroy_dist first");
  }
  std::optional<std::chrono::milliseconds> asked;
  if (options.timeout) asked = internal::checked_timeout(*options.timeout, context);
  const Launcher launcher =
      options.launcher == Launcher::infer ? infer_launcher() : options.launcher;
  internal::World world = internal::read_world(launcher);
  const auto timeout = asked.value_or(world.env.timeout.value_or(std::chrono::minutes(5)));
  // A rank that asks for no launcher is alone, whatever the environment describes.
  const bool is_alone = options.launcher == Launcher::none && options.backend == "auto";
  // Under `lockstep run` the segment knows the process of each rank.
  const bool may_be_taken = !is_alone && world.size > 1 && launcher != Launcher::lockstep;
  if (may_be_taken) internal::check_not_started_by_rank(world);
  internal::join_process(internal::join_world(world, is_alone ? "solo" : options.backend,
                                              context.operation, timeout, where));
  if (may_be_taken) internal::mark_joined(world);
  internal::install_terminate_handler();
}

void destroy_dist(std::string_view failure, std::source_location where) {
  auto session = internal::take_thread_session();
  if (!session && internal::has_rank_threads()) {
    if (internal::has_thread_left()) return;
    throw UsageError(
        {.operation = "destroy_dist", .where = where},
        "threads of this process are ranks of run_ranks, and this thread is not one of them; call "
        "destroy_dist on the rank's own thread, or after run_ranks has returned");
  }
  const bool is_of_process = !session;
  if (is_of_process) session = internal::take_process_session();
  internal::has_failed_regroup() = false;
  if (!session) return;
  if (session->is_forked_child()) {  // the session belongs to the parent process
    static std::atomic<const internal::Session*> kept{nullptr};
    kept.store(session.release(), std::memory_order_relaxed);
    return;
  }
  if (is_of_process) internal::unmark_joined();
  if (failure.empty() && std::uncaught_exceptions() > 0) {
    failure = "an exception (destroy_dist was called while it unwound the stack)";
  }
  session->leave(failure);
}

}  // namespace lockstep
