#include "nn/backend/backend.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <future>
#include <lockstep/env.hpp>
#include <lockstep/objects.hpp>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "engines/hierarchical/hierarchical.hpp"
#include "engines/message/message_engine.hpp"
#include "engines/shared/bootstrap/job.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/solo/solo.hpp"
#include "group/group_state.hpp"
#include "group/leave_on_exception.hpp"
#include "group/native_engine.hpp"
#include "nn/gloo_engine/c10d_error.hpp"
#include "nn/gloo_engine/c10d_transport.hpp"
#include "nn/gloo_engine/c10d_wire.hpp"
#include "nn/interpreter.hpp"
#include "record/recorder.hpp"
#include "world/session.hpp"
#include "world/settings.hpp"
#include "world/variables.hpp"

namespace lockstep::backend {
namespace {

using Config = Backend::Config;

/// Of the default group.
struct WorldMembership {
  std::mutex mutex;
  std::optional<Membership> membership;
};

WorldMembership& world_membership() {
  static auto& only = *new WorldMembership;
  return only;
}

/// Lockstep's own world, if it has the ranks of this default group on several nodes of `lockstep
/// run`; else null.
const internal::Session* session_over_nodes(const Config& config) {
  const internal::Session* const session = internal::session();
  if (!config.is_world() || session == nullptr || session->world().hosts.empty()) return nullptr;
  const Group& world = session->world_group();
  const bool is_same = world.size() == config.size && world.rank() == config.rank;
  return is_same ? session : nullptr;
}

/// In an elastic world not over the store, whose answer a stopped rank 0 would delay for ever: the
/// default group asks over the world, and a group of some ranks knows of it.
std::optional<Membership> find_members_in_elastic_world(const Config& config,
                                                        const std::optional<Membership>& earlier,
                                                        const ErrorContext& context) {
  if (internal::elastic() == nullptr) return {};
  const Group& world = internal::session()->world_group();
  if (config.is_world()) {
    if (world.size() != config.size || world.rank() != config.rank) return {};
    return nn::detail::membership_of(
        config.rank,
        all_gather_object(nn::detail::own_introduction(context), world, {}, context.where));
  }
  if (!earlier || earlier->size() != world.size()) return {};
  Membership membership{
      .rank = config.rank, .job = earlier->job + "-" + config.name, .hosts = {}, .processes = {}};
  std::vector<int> hosts;
  for (const std::uint64_t rank : config.global_ranks) {
    hosts.push_back(earlier->hosts[rank]);
    const auto lowest = std::ranges::find(hosts, hosts.back()) - hosts.begin();
    membership.hosts.push_back(static_cast<int>(lowest));
    membership.processes.push_back(earlier->processes[rank]);
  }
  return membership;
}

/// Collective. Throws PeerLost, TimeoutError, EngineError.
Membership find_members(const Config& config, std::chrono::milliseconds timeout,
                        std::source_location where) {
  const std::optional<Membership> earlier = [&]() -> std::optional<Membership> {
    const std::lock_guard lock(world_membership().mutex);
    if (config.is_world()) world_membership().membership.reset();
    if (config.global_ranks.empty()) return {};
    return world_membership().membership;
  }();
  Membership membership;
  if (config.size > 1) {
    const ErrorContext context{.operation = "init_process_group",
                               .group = config.name,
                               .rank = config.rank,
                               .where = where};
    try {
      if (auto members = find_members_in_elastic_world(config, earlier, context)) {
        membership = *std::move(members);
      } else {
        nn::detail::Rendezvous rendezvous(
            config.store,
            {.context = context,
             .size = config.size,
             .timeout = timeout,
             // A store may outlive the world, whose groups then have the numbers of earlier ones.
             .keys = earlier ? "lockstep/" + earlier->job : "lockstep",
             .action = "join init_process_group or new_group",
             .earlier = earlier ? &*earlier : nullptr,
             .earlier_ranks = {config.global_ranks.begin(), config.global_ranks.end()}});
        rendezvous.join(lockstep::detail::JobClock::now() + timeout);
        membership = rendezvous.membership();
      }
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      nn::detail::throw_store_error(context, error);
    }
  }
  // Nodes are lost as a whole, also two on one machine.
  if (const auto* const session = session_over_nodes(config)) {
    membership.hosts = session->world().hosts;
  }
  if (config.is_world()) {
    const std::lock_guard lock(world_membership().mutex);
    world_membership().membership = membership;
  }
  return membership;
}

/// What make() returns. Gloo connects the ranks on another thread, because it knows nothing of
/// generations and waits minutes for a rank that is lost: that thread ends by itself then.
c10::intrusive_ptr<c10d::Backend> within_generation(
    const shared::Elastic& elastic, std::function<c10::intrusive_ptr<c10d::Backend>()> make,
    const ErrorContext& context) {
  constexpr std::chrono::milliseconds kInterval{2};
  std::packaged_task<c10::intrusive_ptr<c10d::Backend>()> task([make = std::move(make)] {
    try {
      return make();
    } catch (const std::exception& error) {  // of Python: only this thread may destroy it
      throw std::runtime_error(error.what());
    }
  });
  auto made = task.get_future();
  std::thread(std::move(task)).detach();
  while (made.wait_for(kInterval) != std::future_status::ready) elastic.check(context);
  try {
    return made.get();
  } catch (const std::exception& error) {
    // The launcher may know a lost rank a little later.
    const auto end = lockstep::detail::JobClock::now() + elastic.time_of_verdict();
    while (lockstep::detail::JobClock::now() < end) {
      elastic.check(context);
      std::this_thread::sleep_for(kInterval);
    }
    throw EngineError(context, "Gloo cannot connect the ranks: " + std::string(error.what()));
  }
}

/// prefix: of the keys, before the job.
c10::intrusive_ptr<c10d::Backend> make_gloo(const Config& config, const std::string& prefix,
                                            const Membership& membership,
                                            std::chrono::milliseconds timeout) {
  const ErrorContext context{
      .operation = "init_process_group", .group = config.name, .rank = config.rank};
  const auto make =
      [store = c10::make_intrusive<c10d::PrefixStore>(prefix + membership.job, config.store),
       rank = config.rank, size = config.size, timeout,
       is_on_one_host = membership.is_on_one_host()] {
        return interpreter().make_gloo({.store = store,
                                        .rank = rank,
                                        .size = size,
                                        .timeout = timeout,
                                        .is_on_one_host = is_on_one_host});
      };
  const auto elastic = internal::elastic();
  auto gloo = elastic ? within_generation(*elastic, make, context) : make();
  if (gloo) return gloo;
  throw UsageError(context,
                   "ranks on several hosts, or that may not access each other's memory, need Gloo");
}

c10::intrusive_ptr<c10d::ProcessGroup> group_between_hosts(const Config& config,
                                                           const Membership& membership,
                                                           std::chrono::milliseconds timeout) {
  return nn::detail::group_over(make_gloo(config, "lockstep_between/", membership, timeout),
                                c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
                                config.store);
}

/// Over shared memory and, between hosts, over lockstep's world or over Gloo. Collective.
Backend::Joined join(const Config& config, const Membership& membership,
                     std::chrono::milliseconds timeout, std::source_location where) {
  const std::string& name = config.name;
  const Env env = Env::read();
  const Call barrier{.op = Op::barrier,
                     .check = env.check,
                     .group = name,
                     .sequence = 1,
                     .timeout = timeout,
                     .where = where};
  // With a session it has recorded that already.
  if (env.segment && internal::session() == nullptr) {
    const auto local_rank = internal::variable("LOCAL_RANK");
    shared::record_joined(*env.segment, local_rank ? std::atoi(local_rank->c_str()) : -1);
  }
  const internal::Session* const session = session_over_nodes(config);
  if (session != nullptr && !membership.is_on_one_host()) {
    return {.group = internal::NativeGroup::split(
                session->world_group(),
                // Not that of lockstep's own group, beside which it stands in records.
                {.key = config.rank, .name = name + "/torch", .timeout = timeout}, where),
            .engine = nullptr,
            .messages = nullptr};
  }
  std::unique_ptr<Engine> engine;
  std::shared_ptr<internal::Recorder> recorder;
  shared::HostEngine* shared_engine = nullptr;
  if (membership.size() == 1) {
    engine = solo::make();
  } else if (membership.is_on_one_host()) {
    auto joined = shared::bootstrap_world(
        membership.job, membership.rank, membership.size(), barrier, env.tune,
        [&, elastic = internal::elastic()] {  // a rank of a generation that is over may never come
          if (elastic) elastic->check(lockstep::context_of(barrier, membership.rank));
        });
    recorder = joined->recorder();
    shared_engine = joined.get();
    engine = std::move(joined);
  } else {
    auto wire = nn::detail::Wire::make(group_between_hosts(config, membership, timeout),
                                       c10::intrusive_ptr<c10d::Store>(), internal::elastic());
    engine = hierarchical::make(
        message::make("gloo", std::make_unique<nn::detail::Transport>(std::move(wire))),
        membership.hosts, barrier, env.tune);
    recorder = internal::Recorder::in_process(membership.rank, membership.size());
  }
  std::shared_ptr<shared::TaggedMessages> messages;
  internal::leave_on_exception(*engine, [&] {
    if (membership.size() > 1) internal::compare_settings(*engine, barrier);
    if (shared_engine != nullptr) {
      Call allocate = barrier;
      allocate.op = Op::allocate;
      messages = shared_engine->make_messages(allocate);
    }
    // One record per rank: that of lockstep's own world, if the program has joined one.
    if (recorder && name == Config::kWorld && internal::session() == nullptr) {
      if (env.record_dir) recorder->write_to(*env.record_dir);
      if (env.trace_dir) recorder->trace_to(*env.trace_dir, env.restart);
    }
  });
  Engine* const joined = engine.get();
  return {.group = Group(std::make_shared<internal::GroupState>(std::move(engine), name, timeout,
                                                                std::move(recorder), env.check)),
          .engine = joined,
          .messages = std::move(messages)};
}

}  // namespace

c10::intrusive_ptr<Backend> Backend::make(const Config& config) {
  const std::source_location where = interpreter().where();
  const Released released;
  // The program's own, if it is not torch's default. Without end it may be more than clocks can
  // add to now.
  std::chrono::milliseconds timeout =
      config.timeout != kBackendDefaultTimeout
          ? Timeout(config.timeout).or_else({})
          : Env::read().timeout.value_or(std::chrono::milliseconds(config.timeout));
  // A rank that waits for longer than the world's limit would be lost to the next generation.
  if (internal::elastic() != nullptr) {
    timeout = std::min(timeout, internal::session()->world_group().timeout());
  }
  Membership membership = find_members(config, timeout, where);
  Joined joined = join(config, membership, timeout, where);
  c10::intrusive_ptr<c10d::Backend> messages;
  if (config.size > 1) {
    interpreter().watch_interrupts();
    if (!joined.messages) {
      messages = make_gloo(config, "lockstep_messages/", membership, timeout);
    }
  }
  auto options = c10::make_intrusive<Options>("lockstep", joined.group.timeout());
  options->global_ranks_in_group = config.global_ranks;
  auto backend =
      c10::make_intrusive<Backend>(std::move(joined), std::move(options), std::move(messages),
                                   MonitoredBarrier(config.store, std::move(membership)));
  LivingBackends::add(backend);
  return backend;
}

}  // namespace lockstep::backend
