#include "engines/catalog.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <lockstep/error.hpp>
#include <numeric>
#include <utility>

#include "base/exception.hpp"
#include "base/text.hpp"
#include "engines/hierarchical/hierarchical.hpp"
#include "engines/hierarchical/hosts.hpp"
#include "engines/mpi/mpi.hpp"
#include "engines/shared/bootstrap/job.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/shared/segment/membership.hpp"
#include "engines/solo/solo.hpp"
#include "engines/ucx/ucx.hpp"
#include "group/leave_on_exception.hpp"

namespace lockstep::engines {
namespace {

Availability solo_available(const internal::World& world) {
  return {world.size == 1, fmt::format("is for a world of one rank, this one has {}", world.size)};
}

JoinedEngine join_solo(internal::World&, const Call&) { return {.engine = solo::make()}; }

Availability shared_available(const internal::World& world) {
  if (world.local_size != world.size) {
    return {.is_available = false,
            .reason = fmt::format("is for ranks on one host, but only {} of {} are on this one",
                                  world.local_size, world.size)};
  }
  return {.is_available = world.segment.has_value() || !world.job.empty(),
          .reason =
              "needs shared memory: LOCKSTEP_SEGMENT is not set (`lockstep run` sets it), nor are "
              "variables by which the ranks could find each other (MASTER_ADDR and MASTER_PORT, "
              "SLURM_JOB_ID, or those of PMIx)"};
}

/// Of a rank that `lockstep run` started: joins its host's memory of the world that it is in now,
/// of which the launcher tells what has changed.
void enter(internal::World& world, const Call& barrier) {
  if (world.host) return;
  auto [segment, now] =
      shared::current_world(*world.segment, world.local_rank, world.last_generation, barrier);
  world.is_elastic = segment->header().is_elastic;
  if (now.size != world.local_size && !world.is_elastic) {
    throw UsageError(
        context_of(barrier, world.rank),
        fmt::format("{} is {}, but `lockstep run` started {} ranks; do not change the variables it "
                    "sets",
                    world.size == world.local_size ? "WORLD_SIZE" : "LOCAL_WORLD_SIZE",
                    world.local_size, now.size));
  }
  if (world.is_elastic) {
    world.local_rank = now.rank;
    world.local_size = now.size;
    if (now.world_size > 0) {  // not the one that it was started in
      world.rank = now.world_rank;
      world.size = now.world_size;
    }
    world.regrouped.generation = segment->header().generation;
    world.regrouped.lost.clear();
    for (const shared::Lost& lost : now.lost) {
      world.regrouped.lost.push_back({.rank = lost.rank,
                                      .generation = lost.generation,
                                      .why = std::string(base::text_in(lost.why))});
    }
    world.regrouped.joined = std::move(now.joined);
  }
  world.host = std::make_shared<shared::Membership>(std::move(segment), world.local_rank);
}

JoinedEngine joined_in(const internal::World& world, std::unique_ptr<Engine> engine) {
  JoinedEngine joined{.engine = std::move(engine), .recorder = world.host->recorder()};
  if (world.is_elastic) {
    joined.elastic =
        std::make_shared<shared::Elastic>(world.host->shared_segment(), world.local_rank);
  }
  return joined;
}

JoinedEngine join_shared(internal::World& world, const Call& barrier) {
  if (world.segment) {
    enter(world, barrier);
    return joined_in(world, shared::join_world(world.host, barrier));
  }
  auto engine = shared::bootstrap_world(world.job, world.rank, world.size, barrier, world.env.tune);
  auto recorder = engine->recorder();
  return {.engine = std::move(engine), .recorder = std::move(recorder)};
}

JoinedEngine join_mpi(internal::World& world, const Call& barrier) {
  return {.engine = mpi::join(world, barrier)};
}

Availability of(const engines::Module& module) {
  return {.is_available = !module.path.empty(), .reason = module.reason};
}

Availability mpi_available(const internal::World& world) { return of(mpi::find_module(world.mpi)); }

JoinedEngine join_ucx(internal::World& world, const Call& barrier) {
  enter(world, barrier);
  return joined_in(world, ucx::join(world, barrier));
}

Availability ucx_available(const internal::World& world) {
  if (world.launcher != Launcher::lockstep || !world.segment) {
    return {.is_available = false, .reason = "is for ranks that `lockstep run` started"};
  }
  return of(ucx::find_module(world.env.ucx));
}

/// The engine that hierarchical uses between hosts: the first that can send ordinary memory there.
const Entry* find_global(const internal::World& world) {
  for (const Entry& entry : catalog()) {
    if (entry.is_between_hosts && entry.available(world).is_available) return &entry;
  }
  return nullptr;
}

/// Of the libtorch layer, whose rows are there if a program links it.
bool is_of_torch(std::string_view name) { return name == "gloo" || name == "nccl"; }

std::string names_between_hosts() {
  std::string names;
  for (const Entry& entry : catalog()) {
    if (!entry.is_between_hosts || is_of_torch(entry.name)) continue;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", entry.name);
  }
  return names + " or (with libtorch) gloo";
}

// Uses only what is the same on all ranks: the number of ranks per host may differ.
Availability hierarchical_available(const internal::World& world) {
  return {.is_available = world.size > 1 && find_global(world) != nullptr,
          .reason = fmt::format("needs an engine between hosts, {}, and more than one rank",
                                names_between_hosts())};
}

JoinedEngine join_hierarchical(internal::World& world, const Call& barrier) {
  JoinedEngine joined = find_global(world)->join(world, barrier);
  if (!world.host) {
    const std::vector<int> hosts = hierarchical::find_hosts(*joined.engine, barrier);
    joined.engine = hierarchical::make(std::move(joined.engine), hosts, barrier, world.env.tune);
    return joined;
  }
  std::vector<int> on_this_host(static_cast<std::size_t>(world.local_size));
  std::iota(on_this_host.begin(), on_this_host.end(), world.rank - world.local_rank);
  Call among = barrier;
  if (world.local_size < world.size) among.ranks = on_this_host;
  auto local = internal::leave_on_exception(*joined.engine,
                                            [&] { return shared::join_world(world.host, among); });
  joined.engine = hierarchical::make(std::move(joined.engine), world.hosts, barrier,
                                     /*tune=*/{}, std::move(local));
  return joined;
}

}  // namespace

int find_host(Engine& engine, const internal::World& world, const Call& barrier) {
  // If the launcher reports a single host, all ranks know it; otherwise they determine the hosts.
  if (world.local_size == world.size) return 0;
  if (world.host) return world.rank - world.local_rank;
  return hierarchical::find_hosts(engine, barrier)[static_cast<std::size_t>(engine.rank())];
}

const std::vector<Entry>& catalog() {
  static const std::vector<Entry> entries = [] {
    std::vector<Entry> all = {
        {.name = "shared",
         .available = shared_available,
         .join = join_shared,
         .serves_generations = true},
        {.name = "hierarchical",
         .available = hierarchical_available,
         .join = join_hierarchical,
         .serves_generations = true},
        {.name = "ucx",
         .available = ucx_available,
         .join = join_ucx,
         .is_between_hosts = true,
         .serves_generations = true},
        {"mpi", mpi_available, join_mpi, /*is_between_hosts=*/true},
        {"solo", solo_available, join_solo},
    };
    if (lockstep_nn_engines != nullptr) lockstep_nn_engines(all);
    return all;
  }();
  return entries;
}

JoinedEngine join(std::string_view backend, internal::World& world, const Call& barrier) try {
  world.host.reset();
  world.hosts.clear();
  // What the world is now says which engine can serve it.
  const bool may_regroup = std::ranges::any_of(catalog(), [&](const Entry& entry) {
    return entry.serves_generations && (backend == "auto" || backend == entry.name);
  });
  if (may_regroup && world.segment && shared::is_elastic(*world.segment)) enter(world, barrier);
  std::string names;
  std::string reasons;
  for (const Entry& entry : catalog()) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", entry.name);
    if (backend != "auto" && backend != entry.name) continue;
    const Availability availability = entry.available(world);
    if (availability.is_available) {
      JoinedEngine joined = entry.join(world, barrier);
      if (!world.host && world.segment) {
        shared::record_joined(*world.segment, world.local_rank);
      }
      return joined;
    }
    fmt::format_to(std::back_inserter(reasons), "\n  {} {}", entry.name, availability.reason);
  }
  if (reasons.empty()) {
    throw UsageError(
        context_of(barrier, world.rank),
        fmt::format("backend '{}' {}; use auto, {}", backend,
                    is_of_torch(backend) ? "is only in C++ programs that link lockstep::nn"
                                         : "does not exist",
                    names));
  }
  throw EngineError(context_of(barrier, world.rank),
                    fmt::format("no engine can join rank {} of {} (launcher: {}):{}", world.rank,
                                world.size, name_of(world.launcher), reasons));
} catch (...) {
  if (world.host) world.host->leave(base::text_of(std::current_exception()));
  throw;
}

}  // namespace lockstep::engines
