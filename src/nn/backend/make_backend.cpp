#include "nn/backend/backend.hpp"

#include <fmt/format.h>
#include <netdb.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <lockstep/env.hpp>
#include <lockstep/objects.hpp>
#include <mutex>
#include <optional>
#include <random>
#include <variant>

#include "engines/hierarchical/hierarchical.hpp"
#include "engines/message/message_engine.hpp"
#include "engines/shared/bootstrap/job.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/solo/solo.hpp"
#include "group/group_state.hpp"
#include "group/leave_on_exception.hpp"
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
  for (const std::uint64_t rank : config.global_ranks) {
    membership.hosts.push_back(0);
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
  if (config.is_world()) {
    const std::lock_guard lock(world_membership().mutex);
    world_membership().membership = membership;
  }
  return membership;
}

/// prefix: of the keys, before the job.
c10::intrusive_ptr<c10d::Backend> make_gloo(const Config& config, const std::string& prefix,
                                            const Membership& membership) {
  const bool is_on_one_host = membership.is_on_one_host();
  auto gloo = interpreter().make_gloo(
      {.store = c10::make_intrusive<c10d::PrefixStore>(prefix + membership.job, config.store),
       .rank = config.rank,
       .size = config.size,
       .timeout = config.timeout,
       .is_on_one_host = is_on_one_host});
  if (gloo) return gloo;
  throw UsageError({.operation = "init_process_group", .group = config.name, .rank = config.rank},
                   "ranks on several hosts, or that may not access each other's memory, need Gloo");
}

c10::intrusive_ptr<c10d::ProcessGroup> group_between_hosts(const Config& config,
                                                           const Membership& membership) {
  return nn::detail::group_over(make_gloo(config, "lockstep_between/", membership),
                                c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
                                config.store);
}

/// Over shared memory and, between hosts, over Gloo. Collective.
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
    auto wire = nn::detail::Wire::make(group_between_hosts(config, membership),
                                       c10::intrusive_ptr<c10d::Store>());
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

Backend::Parts Backend::form(const Config& config) {
  const std::source_location where = interpreter().where();
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
      messages = make_gloo(config, "lockstep_messages/", membership);
    }
  }
  return {.joined = std::move(joined),
          .messages = std::move(messages),
          .monitored = MonitoredBarrier(config.store, std::move(membership))};
}

c10::intrusive_ptr<Backend> Backend::make(const Config& config) {
  const Released released;
  Config first = config;
  if (config.is_reconfigurable) {  // of this process alone, until reconfigure() forms one
    if (internal::elastic() != nullptr) {
      throw UsageError(
          {.operation = "init_process_group", .group = config.name, .rank = config.rank},
          "enable_reconfigure=True: under lockstep run --elastic, lockstep.regroup forms "
          "the groups of a job");
    }
    first.rank = 0;
    first.size = 1;
  }
  Parts parts = form(first);
  auto options = c10::make_intrusive<Options>("lockstep", parts.joined.group.timeout());
  options->global_ranks_in_group = config.global_ranks;
  auto backend = c10::make_intrusive<Backend>(config, std::move(options), std::move(parts));
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  backend->options_->enable_reconfigure = config.is_reconfigurable;
  if (config.is_reconfigurable) backend->serve();
#endif
  LivingBackends::add(backend);
  return backend;
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
namespace {

/// A store that this process serves for the groups in which it is rank 0.
c10::intrusive_ptr<c10d::TCPStore> serve_store(std::chrono::milliseconds timeout) {
  return c10::make_intrusive<c10d::TCPStore>(
      "localhost",
      c10d::TCPStoreOptions{.port = 0, .isServer = true, .waitWorkers = false, .timeout = timeout});
}

/// "lockstep:ID:HOST:PORT", of no other process.
std::string handle_of(const c10d::TCPStore& store) {
  char host[HOST_NAME_MAX + 1] = {};
  addrinfo* found = nullptr;
  const bool has_name =
      ::gethostname(host, HOST_NAME_MAX) == 0 && ::getaddrinfo(host, nullptr, nullptr, &found) == 0;
  if (found != nullptr) ::freeaddrinfo(found);
  std::random_device random;
  return fmt::format("lockstep:{:08x}{:08x}:{}:{}", random(), random(),
                     has_name ? host : "127.0.0.1", store.getPort());
}

/// The store of the process with this handle.
c10::intrusive_ptr<c10d::Store> connect_to(const std::string& handle,
                                           std::chrono::milliseconds timeout,
                                           const ErrorContext& context) {
  const auto port = handle.rfind(':'), host = handle.find(':', sizeof "lockstep");
  std::uint16_t number = 0;
  if (!handle.starts_with("lockstep:") || host >= port ||
      std::from_chars(&handle[port] + 1, handle.data() + handle.size(), number).ec != std::errc()) {
    throw UsageError(context,
                     fmt::format("'{}' is no handle of a process group over lockstep", handle));
  }
  try {
    return c10::make_intrusive<c10d::TCPStore>(
        handle.substr(host + 1, port - host - 1),
        c10d::TCPStoreOptions{.port = number, .waitWorkers = false, .timeout = timeout});
  } catch (const std::exception& error) {
    nn::detail::throw_store_error(context, error);
  }
}

}  // namespace

void Backend::serve() {
  const auto store = serve_store(options_->timeout);
  handle_ = handle_of(*store);
  store_ = store;
}

Backend::WorkResult Backend::reconfigure(const c10d::ReconfigureOptions& options) {
  const ErrorContext context = context_of("reconfigure", interpreter().where());
  const Released released;
  if (!config_.is_reconfigurable) {
    throw UsageError(context, "the process group was made without enable_reconfigure=True");
  }
  if (process_.is_forked_child()) {
    throw UsageError(context, "this process is a fork of a rank; only the rank itself may call");
  }
  auto handles = std::visit(
      [](const auto& each) { return std::vector<std::string>(each.begin(), each.end()); },
      options.handles);
  // Ranks of a set are the backend's to choose: by the handles, which all know.
  if (!std::holds_alternative<std::vector<std::string>>(options.handles)) {
    std::ranges::sort(handles);
  }
  const auto own = std::ranges::find(handles, handle_);
  if (own == handles.end()) {
    throw UsageError(
        context, fmt::format("the handle of this process, {}, is not among the {} given", handle_,
                             handles.size()));
  }
  if (!uuids_.insert(options.uuid).second) {
    throw UsageError(context,
                     fmt::format("uuid {} was already used in this process group", options.uuid));
  }
  is_formed_ = false;
  end_callbacks("the process group was reconfigured");
  leave({});
  Config config = config_;
  config.rank = static_cast<int>(own - handles.begin());
  config.size = static_cast<int>(handles.size());
  config.timeout = options.timeout.value_or(options_->timeout);
  config.store = c10::make_intrusive<c10d::PrefixStore>(
      fmt::format("lockstep_reconfigure/{}", options.uuid),
      config.rank == 0 ? store_ : connect_to(handles.front(), config.timeout, context));
  Parts parts = form(config);
  joined_.messages.reset();  // uses the engine, which the next line destroys
  joined_ = std::move(parts.joined);
  messages_ = std::move(parts.messages);
  monitored_ = std::move(parts.monitored);
  rank_ = config.rank;
  size_ = config.size;
  n_calls_ = 0;
  has_left_ = false;
  is_shut_down_ = false;
  ++n_formed_;
  is_formed_ = true;
  auto work = c10::make_intrusive<CollectiveWork>(group(), c10d::OpType::UNKNOWN,
                                                  "lockstep:reconfigure", Tensors{}, Tensors{});
  work->complete(nullptr);
  return work;
}
#endif

}  // namespace lockstep::backend
