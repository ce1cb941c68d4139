#include "nn/python/backend_join.hpp"

#include <cstdlib>
#include <lockstep/env.hpp>

#include "engines/hierarchical/hierarchical.hpp"
#include "engines/message/message_engine.hpp"
#include "engines/shared/bootstrap/job.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/solo/solo.hpp"
#include "group/group_state.hpp"
#include "group/leave_on_exception.hpp"
#include "nn/c10d/c10d_transport.hpp"
#include "nn/c10d/c10d_wire.hpp"
#include "record/recorder.hpp"
#include "world/session.hpp"
#include "world/settings.hpp"
#include "world/variables.hpp"

namespace lockstep::python {
Backend::Joined join(const Meeting& meeting, c10::intrusive_ptr<c10d::ProcessGroup> between,
                     std::source_location where) {
  const Membership& membership = meeting.membership;
  const Env env = Env::read();
  const message::Costs costs = message::parse_costs(env.network);
  const Call barrier{.op = Op::barrier,
                     .check = env.check,
                     .group = membership.name,
                     .sequence = 1,
                     .timeout = membership.timeout,
                     .where = where};
  if (env.segment) {
    const auto local_rank = internal::variable("LOCAL_RANK");
    shared::note_joined(*env.segment, local_rank ? std::atoi(local_rank->c_str()) : -1);
  }
  std::unique_ptr<Engine> engine;
  std::shared_ptr<internal::Recorder> recorder;
  shared::HostEngine* shared_engine = nullptr;
  if (membership.size == 1) {
    engine = solo::make();
  } else if (meeting.is_on_one_host()) {
    auto joined =
        shared::bootstrap_world(meeting.job, membership.rank, membership.size, barrier, env.tune);
    recorder = joined->recorder();
    shared_engine = joined.get();
    engine = std::move(joined);
  } else {
    auto wire = nn::detail::Wire::make(std::move(between), c10::intrusive_ptr<c10d::Store>());
    engine = hierarchical::make(
        message::make("gloo", std::make_unique<nn::detail::Transport>(std::move(wire)), costs),
        meeting.hosts, barrier, env.tune);
    recorder = internal::Recorder::in_process(membership.rank, membership.size);
  }
  std::shared_ptr<shared::TaggedMessages> messages;
  internal::leave_on_exception(*engine, [&] {
    if (membership.size > 1) internal::compare_settings(*engine, barrier, costs);
    if (shared_engine != nullptr) {
      Call allocate = barrier;
      allocate.op = Op::allocate;
      messages = shared_engine->make_messages(allocate);
    }
    // One record per rank: that of lockstep's own world, if the program has joined one.
    if (recorder && membership.name == kWorld && internal::session() == nullptr) {
      if (env.record_dir) recorder->write_to(*env.record_dir);
      if (env.trace_dir) recorder->trace_to(*env.trace_dir, env.restart);
    }
  });
  Engine* const joined = engine.get();
  return {
      .group = Group(std::make_shared<internal::GroupState>(
          std::move(engine), membership.name, membership.timeout, std::move(recorder), env.check)),
      .engine = joined,
      .messages = std::move(messages)};
}

}  // namespace lockstep::python
