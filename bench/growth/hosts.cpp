// all_reduce on a simulated cluster over SimGrid's MPI: the actual code of the hierarchical and mpi
// engines, and other algorithms for the level between hosts. ./dev bench growth --hosts
// growth_hosts MODULE HOSTS GBITS ENGINE BYTES...
//
// ENGINE: direct (hierarchical.cpp with the mpi engine between hosts), flat (the mpi engine over
// all ranks), ring, halving, doubling (hierarchical.cpp with that algorithm between hosts). Prints
// lines of HOSTS GBITS ENGINE BYTES, seconds of the call, seconds of a host's first rank between
// hosts. Inside a host the mpi engine runs too, over a link that models the host's memory: futexes
// would stop the simulator. No data is reduced; the time for it is added.

#include <fmt/format.h>

#include <xbt/log.h>
#include <algorithm>
#include <chrono>
#include <compare>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <simgrid/s4u.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "arena.hpp"
#include "engines/hierarchical/hierarchical.hpp"
#include "engines/mpi/mpi.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "kernels/reduce.hpp"
#include "simulated_mpi.hpp"
#include "world/session.hpp"

namespace {

namespace s4u = simgrid::s4u;
using lockstep::Call;
using lockstep::Engine;
using lockstep::Op;

// The cluster and its cost model.
constexpr int kRanksPerHost = 8;
constexpr unsigned kHostsPerSwitch = 16;
constexpr double kLinkSeconds = 0.5e-6;       // 2 links to a host at the same switch, 4 to another
constexpr double kHostBytesPerSecond = 40e9;  // all ranks of a host together, copying
constexpr double kHostSeconds = 0.2e-6;
constexpr double kMessageSeconds = 0.25e-6;   // per message, at the sender and at the receiver
constexpr double kCoreBytesPerSecond = 10e9;  // reading and writing during a reduction

struct Options {
  std::string module;
  unsigned n_hosts = 0;
  double gbits = 0;
  std::string engine;
  std::vector<std::size_t> sizes;
};
Options options;

}  // namespace

// Replaces the library's function.
namespace lockstep::kernels {
void reduce(DType dtype, ReduceOp, const void* const*, int n, void*, std::size_t count) {
  s4u::this_actor::sleep_for(static_cast<double>(n + 1) *
                             static_cast<double>(count * size_of(dtype)) / kCoreBytesPerSecond);
}
}  // namespace lockstep::kernels

namespace {

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

/// A subset of the ranks: first, first + step ...
struct Some {
  int first;
  int step;
  int n;
  auto operator<=>(const Some&) const = default;
};

/// A barrier without cost: MPI_Barrier releases the ranks one after the other.
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
  growth::set_world(comm, start_line(some));
  lockstep::internal::World world;
  world.rank = rank_of(comm);
  world.size = some.n;
  return lockstep::mpi::join(world, barrier);
}

/// The part of an Engine that a test of an algorithm needs.
class Part : public Engine {
 public:
  explicit Part(MPI_Comm comm) : comm_(comm), rank_(rank_of(comm)), size_(size_of(comm)) {}
  std::string_view name() const noexcept override { return "simulated"; }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  std::unique_ptr<Engine> split(const Call&, int, int) override { return nullptr; }
  std::unique_ptr<lockstep::SharedMemory> allocate(const Call&) override { return nullptr; }
  void abandon(std::string_view reason) noexcept override {
    fmt::print(stderr, "growth_hosts: rank {}: {}\n", rank_, reason);
    std::abort();
  }
  void leave(std::string_view) noexcept override {}

 protected:
  const MPI_Comm comm_;
  const int rank_;
  const int size_;
};

/// Textbook all_reduce, without lockstep's comparison of calls.
class Textbook final : public Part {
 public:
  using Part::Part;
  void run(const Call& call) override {
    if (options.engine == "ring") return ring(call);
    if (options.engine == "halving") return halving(call);
    doubling(call);
  }

 private:
  void exchange(int to, int from, const Call& call, std::size_t n_bytes) {
    s4u::this_actor::sleep_for(2 * kMessageSeconds);
    const int n = static_cast<int>(n_bytes);
    MPI_Sendrecv(call.in, n, MPI_BYTE, to, 1, call.out, n, MPI_BYTE, from, 1, comm_,
                 MPI_STATUS_IGNORE);
  }
  void reduce(const Call& call, std::size_t n_bytes) {
    const void* in[2] = {call.out, call.out};
    lockstep::kernels::reduce(lockstep::DType::u8, call.reduce, in, 2, call.out, n_bytes);
  }
  void ring(const Call& call) {
    const std::size_t n_bytes = call.count * lockstep::size_of(call.dtype);
    const std::size_t part =
        (n_bytes + static_cast<std::size_t>(size_) - 1) / static_cast<std::size_t>(size_);
    for (int step = 0; step < 2 * (size_ - 1); ++step) {
      exchange((rank_ + 1) % size_, (rank_ + size_ - 1) % size_, call, part);
      if (step < size_ - 1) reduce(call, part);
    }
  }
  void halving(const Call& call) {  // the number of hosts is a power of two
    std::size_t n_bytes = call.count * lockstep::size_of(call.dtype);
    std::vector<std::size_t> parts;
    for (int far = size_ / 2; far > 0; far /= 2) {
      n_bytes = (n_bytes + 1) / 2;
      parts.push_back(n_bytes);
      exchange(rank_ ^ far, rank_ ^ far, call, n_bytes);
      reduce(call, n_bytes);
    }
    for (int far = 1; far < size_; far *= 2) {
      exchange(rank_ ^ far, rank_ ^ far, call, parts.back());
      parts.pop_back();
    }
  }
  void doubling(const Call& call) {
    const std::size_t n_bytes = call.count * lockstep::size_of(call.dtype);
    for (int far = 1; far < size_; far *= 2) {
      exchange(rank_ ^ far, rank_ ^ far, call, n_bytes);
      reduce(call, n_bytes);
    }
  }
};

double seconds = 0;          // of the slowest rank
double seconds_between = 0;  // of rank 0

class Timed final : public Part {
 public:
  Timed(MPI_Comm comm, std::unique_ptr<Engine> engine) : Part(comm), engine_(std::move(engine)) {}
  void run(const Call& call) override {
    const double start = MPI_Wtime();
    engine_->run(call);
    if (rank_ == 0) seconds_between += MPI_Wtime() - start;
  }

 private:
  std::unique_ptr<Engine> engine_;
};

/// All ranks, for hierarchical.cpp to build its levels. With the mpi engine, each rank would send a
/// message to each other rank for that: 67 million at 8,192.
class AllRanks final : public Part {
 public:
  using Part::Part;
  void run(const Call& call) override {  // the numbers that give the host's bootstrap its name
    const auto n = static_cast<std::size_t>(size_) * call.count;
    std::fill_n(static_cast<char*>(call.out), n, '\0');
  }
  std::unique_ptr<Engine> split(const Call& call, int color, int) override {
    if (color != 0) return nullptr;  // one rank per host communicates between hosts
    const Some leaders{0, kRanksPerHost, size_ / kRanksPerHost};
    MPI_Comm comm = comm_of(leaders);
    if (options.engine != "direct") {
      return std::make_unique<Timed>(comm, std::make_unique<Textbook>(comm));
    }
    Call barrier = call;
    barrier.op = Op::barrier;
    return std::make_unique<Timed>(comm, join(leaders, barrier));
  }
};

}  // namespace

namespace lockstep::shared {
std::unique_ptr<Engine> bootstrap_world(std::string_view, int, int n_ranks, const Call& barrier,
                                        const std::optional<std::string>&) {
  return join({rank_of(MPI_COMM_WORLD) / n_ranks * n_ranks, 1, n_ranks}, barrier);
}
void extend_deadline(Engine&, std::chrono::nanoseconds) noexcept {}
void begin_elsewhere(Engine&, const Call&) {}
void end_elsewhere(Engine&) noexcept {}
}  // namespace lockstep::shared

namespace {

void run_rank() {
  MPI_Init(nullptr, nullptr);
  const int rank = rank_of(MPI_COMM_WORLD);
  const int n_ranks = size_of(MPI_COMM_WORLD);
  if (rank == 0) growth::arena = static_cast<char*>(SMPI_SHARED_MALLOC(growth::kArenaBytes));
  const Some all_ranks{0, 1, n_ranks};
  Call barrier;
  barrier.timeout = std::chrono::hours(24);
  std::unique_ptr<Engine> engine;
  if (options.engine == "flat") {
    engine = join(all_ranks, barrier);
  } else {
    std::vector<int> hosts;
    for (int r = 0; r < n_ranks; ++r) hosts.push_back(r / kRanksPerHost * kRanksPerHost);
    engine =
        lockstep::hierarchical::make(std::make_unique<AllRanks>(MPI_COMM_WORLD), hosts, barrier);
  }
  for (const std::size_t n_bytes : options.sizes) {
    std::vector<float> small(n_bytes < growth::kLarge ? n_bytes / sizeof(float) : 0);
    Call call = barrier;
    call.op = Op::all_reduce;
    call.dtype = lockstep::DType::f32;
    call.count = n_bytes / sizeof(float);
    call.out = small.empty() ? static_cast<void*>(growth::arena) : small.data();
    call.in = call.out;
    start_line(all_ranks)->wait();
    seconds = seconds_between = 0;
    const double start = MPI_Wtime();
    engine->run(call);
    seconds = std::max(seconds, MPI_Wtime() - start);
    start_line(all_ranks)->wait();
    if (rank != 0) continue;
    fmt::print("{} {:g} {} {} {:.9f} {:.9f}\n", options.n_hosts, options.gbits, options.engine,
               n_bytes, seconds, seconds_between);
    std::fflush(stdout);
  }
  engine.reset();
  MPI_Finalize();
}

void build_cluster(s4u::Engine& simulation) {
  const double bytes_per_second = options.gbits * 1e9 / 8;
  const unsigned n_below = std::min(options.n_hosts, kHostsPerSwitch);
  const unsigned n_switches = options.n_hosts / n_below;
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

int main(int argc, char** argv) {
  xbt_log_control_set("root.thres:warning");
  int n_arguments = 1;
  s4u::Engine simulation(&n_arguments, argv);
  if (argc < 6) {
    fmt::print(stderr, "usage: growth_hosts MODULE HOSTS GBITS ENGINE BYTES...\n");
    return 1;
  }
  options = {argv[1], static_cast<unsigned>(std::atoi(argv[2])), std::atof(argv[3]), argv[4], {}};
  for (int i = 5; i < argc; ++i) options.sizes.push_back(std::strtoull(argv[i], nullptr, 10));
  setenv("LOCKSTEP_MPI", options.module.c_str(), 1);
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
  build_cluster(simulation);
  const int n_ranks = static_cast<int>(options.n_hosts) * kRanksPerHost;
  SMPI_app_instance_register("lockstep", nullptr, n_ranks);
  growth::set_seconds_per_message(kMessageSeconds);
  for (int rank = 0; rank < n_ranks; ++rank) {
    auto actor =
        s4u::Actor::init(fmt::format("rank-{}", rank),
                         simulation.host_by_name(fmt::format("host-{}", rank / kRanksPerHost)));
    actor->set_property("instance_id", "lockstep");
    actor->set_property("rank", std::to_string(rank));
    actor->start(run_rank);
  }
  simulation.run();
  SMPI_finalize();
}
