#include <lockstep/elastic.hpp>

#include <lockstep/error.hpp>
#include <memory>
#include <utility>

#include "engines/shared/bootstrap/shared_world.hpp"
#include "group/group_state.hpp"
#include "world/session.hpp"

namespace lockstep {
namespace {

void check(const internal::Session* session, const ErrorContext& context) {
  if (session == nullptr || internal::has_rank_threads()) {
    throw UsageError(context, session == nullptr
                                  ? "this process is in no world; call init_dist first"
                                  : "the ranks of run_ranks are threads of one process, and are "
                                    "lost together");
  }
  if (session->is_forked_child()) throw UsageError(context, "this process is a fork of a rank");
  if (session->elastic() == nullptr) {
    throw UsageError(context,
                     "no launcher keeps this world running; start the program with "
                     "`lockstep run -n N --elastic MIN`, over the shared engine");
  }
}

}  // namespace

Regrouped regroup(Timeout timeout, std::source_location where) {
  const internal::Session* const session = internal::session();
  const ErrorContext context{.operation = "regroup", .where = where};
  check(session, context);
  const Group world_group = session->world_group();
  const auto limit = timeout.or_else(world_group.timeout());
  // Where nothing has failed, every rank ends its calls on other groups before one ends the
  // generation.
  if (!session->has_failed()) {
    try {
      world_group.barrier(limit, where);
      // All agree to leave a generation that has not failed.
      session->elastic()->step_done();
    } catch (const PeerLost&) {
    } catch (const PeerFailed&) {
    } catch (const TimeoutError&) {
    }
  }
  internal::World world = session->world();
  world.last_generation = static_cast<std::int64_t>(world.regrouped.generation);
  // Kept until the generation is over, which ends its calls under way.
  const std::unique_ptr<internal::Session> former = internal::take_process_session();
  internal::has_failed_regroup() = true;  // until it has joined
  former->regroup();
  auto next = internal::join_world(std::move(world), "auto", context.operation, limit, where);
  Regrouped regrouped = next->world().regrouped;
  internal::join_process(std::move(next));
  return regrouped;
}

void step_done() noexcept {
  if (const auto elastic = internal::elastic()) elastic->step_done();
}

void internal::finish_elastic() noexcept {
  if (const auto elastic = internal::elastic()) elastic->finish();
}

bool internal::has_earlier_steps() noexcept {
  const auto elastic = internal::elastic();
  return elastic != nullptr && elastic->has_earlier_steps();
}

bool internal::is_beside_elastic() {
  const Session* const session = internal::session();
  if (session == nullptr || session->elastic() != nullptr) return false;
  const auto& segment = session->world().segment;
  return segment && shared::is_elastic(*segment);
}

bool is_elastic() noexcept { return internal::elastic() != nullptr; }

bool has_waiting_replacements() noexcept {
  const auto elastic = internal::elastic();
  return elastic != nullptr && elastic->has_waiting_replacements();
}

}  // namespace lockstep
