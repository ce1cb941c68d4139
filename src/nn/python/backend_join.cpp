#include "nn/python/backend_join.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <lockstep/env.hpp>
#include <lockstep/error.hpp>

#include "base/exception.hpp"
#include "engines/hierarchical/hierarchical.hpp"
#include "engines/hierarchical/hosts.hpp"
#include "engines/message/message_engine.hpp"
#include "engines/shared/bootstrap/job.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/solo/solo.hpp"
#include "group/group_state.hpp"
#include "nn/c10d/c10d_transport.hpp"
#include "nn/c10d/c10d_wire.hpp"
#include "record/recorder.hpp"
#include "world/arithmetic.hpp"
#include "world/session.hpp"

namespace lockstep::python {
namespace {

/// The same on two ranks only if they can share memory and see each other's end: of one boot of one
/// system, one user, one network namespace (in which they meet) and one PID namespace.
std::string host_id() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  if (id.empty()) id = fmt::format("{:016x}", hierarchical::draw_nonce());
  for (const char* const name : {"/proc/self/ns/net", "/proc/self/ns/pid"}) {
    struct stat status {};
    if (::stat(name, &status) == 0) id += fmt::format(" {}", status.st_ino);
  }
  return fmt::format("{} {}", id, ::geteuid());
}

/// Every rank's `value`, in rank order.
std::vector<std::string> exchange(c10d::Store& store, const Membership& membership,
                                  const std::string& value, const ErrorContext& context) {
  // A store may outlive several process groups of one name: the n-th of each rank meet.
  const auto key = [&](int rank, std::int64_t n) { return fmt::format("lockstep/{}/{}", n, rank); };
  const std::int64_t n = store.add(fmt::format("lockstep/{}", membership.rank), 1);
  store.set(key(membership.rank, n), value);
  std::vector<std::string> keys;
  for (int rank = 0; rank < membership.size; ++rank) keys.push_back(key(rank, n));
  try {
    store.wait(keys, membership.timeout);
  } catch (const std::exception& error) {
    std::vector<int> late;
    for (int rank = 0; rank < membership.size; ++rank) {
      if (!store.check({key(rank, n)})) late.push_back(rank);
    }
    if (late.empty()) throw EngineError(context, fmt::format("the store failed: {}", error.what()));
    throw TimeoutError(context,
                       fmt::format("rank{} {} did not come to init_process_group or new_group "
                                   "within the timeout of {} ms",
                                   late.size() == 1 ? "" : "s", fmt::join(late, ", "),
                                   membership.timeout.count()));
  }
  std::vector<std::string> values;
  for (const std::string& each : keys) values.push_back(store.get_to_str(each));
  return values;
}

}  // namespace

Meeting meet(c10d::Store& store, const Membership& membership, std::source_location where) {
  const ErrorContext context{.operation = "init_process_group",
                             .group = membership.name,
                             .rank = membership.rank,
                             .where = where};
  Meeting meeting{.membership = membership, .job = {}, .hosts = {0}};
  if (membership.size == 1) return meeting;
  constexpr std::size_t kDigits = 16;
  const std::string own = fmt::format("{:016x}{}", hierarchical::draw_nonce(), host_id());
  const std::vector<std::string> all = exchange(store, membership, own, context);
  meeting.job = "torch-" + all.front().substr(0, kDigits);
  meeting.hosts.clear();
  for (const std::string& each : all) {
    const auto lowest = std::find_if(all.begin(), all.end(), [&](const std::string& other) {
      return other.substr(kDigits) == each.substr(kDigits);
    });
    meeting.hosts.push_back(static_cast<int>(lowest - all.begin()));
  }
  return meeting;
}

Backend::Joined join(const Meeting& meeting, c10::intrusive_ptr<c10d::ProcessGroup> between,
                     std::source_location where) {
  const Membership& membership = meeting.membership;
  const Env env = Env::read();
  const auto timeout = env.timeout.value_or(membership.timeout);
  const Call barrier{.op = Op::barrier,
                     .check = env.check,
                     .group = membership.name,
                     .sequence = 1,
                     .timeout = timeout,
                     .where = where};
  if (env.segment) shared::note_joined(*env.segment);
  std::unique_ptr<Engine> engine;
  std::shared_ptr<internal::Recorder> recorder;
  if (membership.size == 1) {
    engine = solo::make();
  } else if (meeting.is_on_one_host()) {
    engine =
        shared::bootstrap_world(meeting.job, membership.rank, membership.size, barrier, env.tune);
    recorder = shared::recorder_of(*engine);
  } else {
    auto wire = nn::detail::Wire::make(std::move(between), c10::intrusive_ptr<c10d::Store>());
    engine = hierarchical::make(
        message::make("gloo", std::make_unique<nn::detail::Transport>(std::move(wire))),
        meeting.hosts, barrier, env.tune);
    recorder = internal::Recorder::in_process(membership.rank, membership.size);
  }
  if (membership.size > 1) {
    try {
      internal::check_arithmetic(*engine, barrier);
    } catch (...) {  // possibly on this rank only
      engine->leave(base::text_of(std::current_exception()));
      throw;
    }
  }
  // One record per rank: that of lockstep's own world, if the program has joined one.
  if (recorder && membership.name == kWorld && internal::session() == nullptr) {
    if (env.record_dir) recorder->write_to(*env.record_dir);
    if (env.trace_dir) recorder->trace_to(*env.trace_dir, env.restart);
  }
  Engine* const joined = engine.get();
  return {.group = Group(std::make_shared<internal::GroupState>(
              std::move(engine), membership.name, timeout, std::move(recorder), env.check)),
          .engine = joined};
}

}  // namespace lockstep::python
