// all_reduce on a simulated cluster over SimGrid's MPI: the actual code of the hierarchical and mpi
// engines. ./dev bench growth --hosts
// growth_hosts MODULE HOSTS GBITS BYTES...
//
// Prints lines of HOSTS GBITS BYTES, seconds of the call, seconds of a host's first rank between
// hosts. Inside a host the mpi engine runs too, over a link that models the host's memory: futexes
// would stop the simulator. No data is reduced; the time for it is added.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <simgrid/s4u.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "arena.hpp"
#include "cluster.hpp"
#include "engines/hierarchical/hierarchical.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"

namespace {

using growth::comm_of;
using growth::kRanksPerHost;
using growth::Part;
using growth::rank_of;
using growth::size_of;
using growth::Some;
using growth::start_line;
using lockstep::Call;
using lockstep::Engine;
using lockstep::Op;

growth::Cluster cluster;
std::vector<std::size_t> sizes;

double seconds = 0;          // of the slowest rank
double seconds_between = 0;  // of rank 0

class Timed final : public Part {
 public:
  explicit Timed(std::unique_ptr<Engine> engine)
      : Part(engine->rank(), engine->size()), engine_(std::move(engine)) {}
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
  explicit AllRanks(MPI_Comm comm) : Part(rank_of(comm), size_of(comm)) {}
  void run(const Call& call) override {  // the numbers that give the host's bootstrap its name
    const auto n = static_cast<std::size_t>(size_) * call.count;
    std::fill_n(static_cast<char*>(call.out), n, '\0');
  }
  std::unique_ptr<Engine> split(const Call& call, int color, int) override {
    if (color != 0) return nullptr;  // one rank per host communicates between hosts
    const Some leaders{0, kRanksPerHost, size_ / kRanksPerHost};
    Call barrier = call;
    barrier.op = Op::barrier;
    return std::make_unique<Timed>(growth::join(leaders, barrier));
  }
};

}  // namespace

namespace lockstep::shared {
std::unique_ptr<HostEngine> bootstrap_world(std::string_view, int, int n_ranks, const Call& barrier,
                                            const std::optional<std::string>&,
                                            const std::function<void()>&) {
  return std::make_unique<growth::Host>(
      growth::join({rank_of(MPI_COMM_WORLD) / n_ranks * n_ranks, 1, n_ranks}, barrier));
}
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
  std::vector<int> hosts;
  for (int r = 0; r < n_ranks; ++r) hosts.push_back(r / kRanksPerHost * kRanksPerHost);
  auto engine =
      lockstep::hierarchical::make(std::make_unique<AllRanks>(MPI_COMM_WORLD), hosts, barrier);
  for (const std::size_t n_bytes : sizes) {
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
    fmt::print("{} {:g} {} {:.9f} {:.9f}\n", cluster.n_hosts, cluster.gbits, n_bytes, seconds,
               seconds_between);
    std::fflush(stdout);
  }
  engine.reset();
  MPI_Finalize();
}

}  // namespace

int main(int argc, char** argv) {
  int n_arguments = 1;
  simgrid::s4u::Engine simulation(&n_arguments, argv);
  if (argc < 5) {
    fmt::print(stderr, "usage: growth_hosts MODULE HOSTS GBITS BYTES...\n");
    return 1;
  }
  cluster = {.module = argv[1], .n_hosts = std::atoi(argv[2]), .gbits = std::atof(argv[3])};
  for (int i = 4; i < argc; ++i) sizes.push_back(std::strtoull(argv[i], nullptr, 10));
  growth::simulate(simulation, cluster, run_rank);
}
