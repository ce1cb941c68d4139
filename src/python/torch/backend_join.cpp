#include "python/torch/backend_join.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <lockstep/env.hpp>
#include <lockstep/error.hpp>

#include "base/exception.hpp"
#include "engines/hierarchical/hosts.hpp"
#include "engines/shared/bootstrap/job.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/solo/solo.hpp"
#include "group/group_state.hpp"
#include "record/recorder.hpp"
#include "world/arithmetic.hpp"

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

Backend::Joined join(c10d::Store& store, const Membership& membership, std::source_location where) {
  const Env env = Env::read();
  const auto timeout = env.timeout.value_or(membership.timeout);
  const Call barrier{.op = Op::barrier,
                     .check = env.check,
                     .group = membership.name,
                     .sequence = 1,
                     .timeout = timeout,
                     .where = where};
  const ErrorContext context{.operation = "init_process_group",
                             .group = membership.name,
                             .rank = membership.rank,
                             .where = where};
  if (env.segment) shared::note_joined(*env.segment);
  std::unique_ptr<Engine> engine;
  std::shared_ptr<internal::Recorder> recorder;
  if (membership.size == 1) {
    engine = solo::make();
  } else {
    const auto ids =
        exchange(store, membership,
                 fmt::format("{:016x} {}", hierarchical::draw_nonce(), host_id()), context);
    const auto host_of = [](const std::string& id) { return id.substr(17); };
    std::vector<int> elsewhere;
    for (int rank = 0; rank < membership.size; ++rank) {
      if (host_of(ids[static_cast<std::size_t>(rank)]) != host_of(ids.front())) {
        elsewhere.push_back(rank);
      }
    }
    if (!elsewhere.empty()) {
      throw EngineError(
          context, fmt::format("rank{} {} and rank 0 are on different hosts (or in containers that "
                               "do not see each other), over which the backend lockstep does not "
                               "reach yet: use \"gloo\"",
                               elsewhere.size() == 1 ? "" : "s", fmt::join(elsewhere, ", ")));
    }
    engine = shared::bootstrap_world("torch-" + ids.front().substr(0, 16), membership.rank,
                                     membership.size, barrier, env.tune);
    recorder = shared::recorder_of(*engine);
    try {
      internal::check_arithmetic(*engine, barrier);
    } catch (...) {
      engine->leave(base::text_of(std::current_exception()));
      throw;
    }
  }
  Engine* const joined = engine.get();
  return {.group = Group(std::make_shared<internal::GroupState>(
              std::move(engine), membership.name, timeout, std::move(recorder), env.check)),
          .engine = joined};
}

}  // namespace lockstep::python
