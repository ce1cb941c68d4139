#include "cluster.hpp"

#include <fmt/format.h>

#include <xbt/log.h>
#include <algorithm>
#include <cstdlib>
#include <map>
#include <vector>

#include "engines/mpi/mpi.hpp"
#include "kernels/reduce.hpp"
#include "simulated_mpi.hpp"
#include "world/session.hpp"

namespace s4u = simgrid::s4u;
using lockstep::Call;
using lockstep::Engine;

// Replaces the library's function.
namespace lockstep::kernels {
void reduce(DType dtype, ReduceOp, const void* const*, int n, void*, std::size_t count) {
  s4u::this_actor::sleep_for(static_cast<double>(n + 1) *
                             static_cast<double>(count * size_of(dtype)) /
                             growth::kCoreBytesPerSecond);
}
}  // namespace lockstep::kernels

namespace growth {
namespace {

constexpr unsigned kHostsPerSwitch = 16;
constexpr double kLinkSeconds = 0.5e-6;       // 2 links to a host at the same switch, 4 to another
constexpr double kHostBytesPerSecond = 40e9;  // all ranks of a host together, copying
constexpr double kHostSeconds = 0.2e-6;

void build(s4u::Engine& simulation, const Cluster& cluster) {
  const double bytes_per_second = cluster.gbits * 1e9 / 8;
  const auto n_hosts = static_cast<unsigned>(cluster.n_hosts);
  const unsigned n_below = std::min(n_hosts, kHostsPerSwitch);
  const unsigned n_switches = n_hosts / n_below;
  // Each switch has as many uplinks as downlinks, so the tree is never the bottleneck.
  const s4u::FatTreeParams shape =
      n_switches == 1 ? s4u::FatTreeParams(1, {n_below}, {1}, {1})
                      : s4u::FatTreeParams(2, {n_below, n_switches}, {1, n_below}, {1, 1});
  const s4u::ClusterCallbacks callbacks(
      [](s4u::NetZone* zone, const std::vector<unsigned long>&, unsigned long id) {
        auto* host = zone->create_host(fmt::format("host-{}", id), 1e9)->set_core_count(8)->seal();
        return std::make_pair(host->get_netpoint(),
                              static_cast<simgrid::kernel::routing::NetPoint*>(nullptr));
      },
      [](s4u::NetZone* zone, const std::vector<unsigned long>&, unsigned long id) {
        return zone->create_link(fmt::format("memory-{}", id), kHostBytesPerSecond)
            ->set_latency(kHostSeconds)
            ->seal();
      },
      {});
  s4u::create_fatTree_zone("cluster", simulation.get_netzone_root(), shape, callbacks,
                           bytes_per_second, kLinkSeconds, s4u::Link::SharingPolicy::SPLITDUPLEX)
      ->seal();
}

}  // namespace

int rank_of(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 0;
  MPI_Comm_size(comm, &size);
  return size;
}

s4u::BarrierPtr start_line(const Some& some) {
  static std::map<Some, s4u::BarrierPtr> lines;
  s4u::BarrierPtr& line = lines[some];
  if (!line) line = s4u::Barrier::create(static_cast<unsigned>(some.n));
  return line;
}

MPI_Comm comm_of(const Some& some) {
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group group = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  std::vector<int> ranks;
  for (int i = 0; i < some.n; ++i) ranks.push_back(some.first + i * some.step);
  MPI_Comm_group(MPI_COMM_WORLD, &all);
  MPI_Group_incl(all, some.n, ranks.data(), &group);
  MPI_Comm_create_group(MPI_COMM_WORLD, group, /*tag=*/1, &comm);
  return comm;
}

std::unique_ptr<Engine> join(const Some& some, const Call& barrier) {
  MPI_Comm comm = comm_of(some);
  set_world(comm, start_line(some));
  lockstep::internal::World world;
  world.rank = rank_of(comm);
  world.size = some.n;
  return lockstep::mpi::join(world, barrier);
}

void Part::abandon(std::string_view reason) noexcept {
  fmt::print(stderr, "growth: rank {}: {}\n", rank_, reason);
  std::abort();
}

void simulate(s4u::Engine& simulation, const Cluster& cluster,
              const std::function<void()>& run_rank) {
  xbt_log_control_set("root.thres:warning");
  setenv("LOCKSTEP_MPI", cluster.module.c_str(), 1);
  SMPI_init();
  // Plain max-min sharing of links, without SimGrid's calibration for TCP and its authors'
  // machines. The senders' lists of detached messages are searched for each message: use none.
  for (const char* const setting :
       {"network/model:CM02", "network/TCP-gamma:0", "network/bandwidth-factor:1",
        "network/latency-factor:1", "network/weight-S:0", "network/crosstraffic:0",
        "smpi/simulate-computation:no", "smpi/privatization:no", "smpi/send-is-detached-thresh:0",
        "contexts/stack-size:256", "contexts/guard-size:0"}) {
    s4u::Engine::set_config(setting);
  }
  build(simulation, cluster);
  const int n_ranks = cluster.n_hosts * cluster.n_actors;
  SMPI_app_instance_register("lockstep", nullptr, n_ranks);
  set_seconds_per_message(kMessageSeconds);
  for (int rank = 0; rank < n_ranks; ++rank) {
    const int host = cluster.are_together ? rank / cluster.n_actors : rank % cluster.n_hosts;
    auto actor = s4u::Actor::init(fmt::format("rank-{}", rank),
                                  simulation.host_by_name(fmt::format("host-{}", host)));
    actor->set_property("instance_id", "lockstep");
    actor->set_property("rank", std::to_string(rank));
    actor->start(run_rank);
  }
  simulation.run();
  SMPI_finalize();
}

}  // namespace growth
