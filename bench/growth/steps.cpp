// Steps of training on a simulated cluster over SimGrid's MPI: computing, exchanges of
// SyncBatchNorm on the training thread, and buckets of gradients on another, over the actual code
// of the hierarchical and mpi engines. scripts/growth_steps.py writes the schedules and calls it.
// growth_steps MODULE HOSTS GBITS SCHEDULE:SLOW...
//
// SCHEDULE: a file of lines
//   compute SECONDS    moments COUNT    sums COUNT    bucket BYTES
// SLOW: one host's ranks compute that many times longer. Prints lines of HOSTS GBITS SCHEDULE SLOW,
// seconds of the step.
//
// Two contexts stand for the two threads of the ranks of a host, which all do the same; what they
// do together in shared memory takes a time by the memory's bandwidth. No data is reduced; the time
// for it is added.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
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

namespace s4u = simgrid::s4u;
using growth::kRanksPerHost;
using growth::Part;
using growth::Some;
using lockstep::Call;
using lockstep::DType;
using lockstep::Engine;
using lockstep::Op;

constexpr double kPhaseSeconds = 1e-6;
constexpr double kMemoryBytesPerSecond = 200e9;  // of a host, all its ranks together
struct Action {
  std::string kind;
  double value = 0;
};
struct Step {
  std::string schedule;
  double slow = 1;
  std::vector<Action> actions;
};

growth::Cluster cluster;
std::vector<Step> steps;

double seconds = 0;                           // of the slowest host
std::vector<s4u::SemaphorePtr> are_complete;  // by host: buckets whose gradients exist
std::vector<s4u::SemaphorePtr> are_averaged;  // by host: all buckets of the step

/// The shared engine of one host, for all its ranks.
class HostMemory final : public Part {
 public:
  HostMemory() : Part(/*rank=*/0, kRanksPerHost) {}
  void run(const Call& call) override {
    constexpr int kOthers = kRanksPerHost - 1;
    const double n_bytes = static_cast<double>(call.count * lockstep::size_of(call.dtype));
    // Each part is read and the sum is written; or read and written by each other rank.
    const int n_passes = call.op == Op::reduce ? kRanksPerHost + 1 : 2 * kOthers;
    s4u::this_actor::sleep_for(kPhaseSeconds + n_passes * n_bytes / kMemoryBytesPerSecond);
  }
};

/// All ranks, of which those of a host are one context, for hierarchical.cpp to build its levels.
class AllRanks final : public Part {
 public:
  explicit AllRanks(int host) : Part(host * kRanksPerHost, cluster.n_hosts * kRanksPerHost) {}
  void run(const Call& call) override {  // the numbers that give the host's bootstrap its name
    const auto n = static_cast<std::size_t>(size_) * call.count;
    std::fill_n(static_cast<char*>(call.out), n, '\0');
  }
  std::unique_ptr<Engine> split(const Call& call, int, int) override {
    const int first = growth::rank_of(MPI_COMM_WORLD) / cluster.n_hosts * cluster.n_hosts;
    const Some contexts{first, 1, cluster.n_hosts};
    Call barrier = call;
    barrier.op = Op::barrier;
    return growth::join(contexts, barrier);
  }
};

}  // namespace

namespace lockstep::shared {
std::unique_ptr<HostEngine> bootstrap_world(std::string_view, int, int, const Call&,
                                            const std::optional<std::string>&,
                                            const std::function<void()>&) {
  return std::make_unique<growth::Host>(std::make_unique<HostMemory>());
}
}  // namespace lockstep::shared

namespace {

/// One thread of the ranks of a host.
class Thread {
 public:
  Thread(int host, bool is_training) : host_(host), is_training_(is_training) {
    call_.timeout = std::chrono::hours(24);
    std::vector<int> hosts;
    for (int r = 0; r < cluster.n_hosts * kRanksPerHost; ++r) {
      hosts.push_back(r / kRanksPerHost * kRanksPerHost);
    }
    engine_ = lockstep::hierarchical::make(std::make_unique<AllRanks>(host), hosts, call_);
    call_.op = Op::all_reduce;
  }

  void run(const Step& step) {
    if (!is_training_) {
      for (const Action& action : step.actions) {
        if (action.kind != "bucket") continue;
        are_complete[at()]->acquire();
        all_reduce(DType::u8, static_cast<std::size_t>(action.value));
      }
      return are_averaged[at()]->release();
    }
    const bool is_the_one = host_ == cluster.n_hosts / 2;
    const double slow = is_the_one ? step.slow : 1;
    const double start = s4u::Engine::get_clock();
    for (const Action& action : step.actions) {
      const auto count = static_cast<std::size_t>(action.value);
      if (action.kind == "compute") s4u::this_actor::sleep_for(action.value * slow);
      if (action.kind == "moments") all_reduce(lockstep::detail::kMoments, count);
      if (action.kind == "sums") all_reduce(DType::f64, count);
      if (action.kind == "bucket") are_complete[at()]->release();
    }
    are_averaged[at()]->acquire();
    seconds = std::max(seconds, s4u::Engine::get_clock() - start);
  }

 private:
  std::size_t at() const { return static_cast<std::size_t>(host_); }
  void all_reduce(DType dtype, std::size_t count) {
    const std::size_t n_bytes = count * lockstep::size_of(dtype);
    std::vector<std::byte> small(n_bytes < growth::kLarge ? n_bytes : 0);
    call_.dtype = dtype;
    call_.count = count;
    call_.out = small.empty() ? static_cast<void*>(growth::arena) : small.data();
    call_.in = call_.out;
    engine_->run(call_);
  }

  const int host_;
  const bool is_training_;
  Call call_;
  std::unique_ptr<Engine> engine_;
};

void run_rank() {
  MPI_Init(nullptr, nullptr);
  const int rank = growth::rank_of(MPI_COMM_WORLD);
  if (rank == 0) growth::arena = static_cast<char*>(SMPI_SHARED_MALLOC(growth::kArenaBytes));
  const s4u::BarrierPtr line = growth::start_line({0, 1, 2 * cluster.n_hosts});
  line->wait();
  {
    Thread thread(rank % cluster.n_hosts, /*is_training=*/rank < cluster.n_hosts);
    for (const Step& step : steps) {
      line->wait();
      seconds = 0;
      thread.run(step);
      line->wait();
      if (rank != 0) continue;
      fmt::print("{} {:g} {} {:g} {:.9f}\n", cluster.n_hosts, cluster.gbits, step.schedule,
                 step.slow, seconds);
      std::fflush(stdout);
    }
  }
  MPI_Finalize();
}

Step step_of(const std::string& text) {
  const auto slow = text.rfind(':');
  Step step{.schedule = text.substr(0, slow),
            .slow = std::atof(text.substr(slow + 1).c_str()),
            .actions = {}};
  std::ifstream file(step.schedule);
  for (Action action; file >> action.kind >> action.value;) step.actions.push_back(action);
  if (step.actions.empty()) {
    fmt::print(stderr, "growth_steps: {}: no schedule\n", step.schedule);
    std::exit(1);
  }
  return step;
}

}  // namespace

int main(int argc, char** argv) {
  int n_arguments = 1;
  s4u::Engine simulation(&n_arguments, argv);
  if (argc < 5) {
    fmt::print(stderr, "usage: growth_steps MODULE HOSTS GBITS SCHEDULE:SLOW...\n");
    return 1;
  }
  cluster = {.module = argv[1],
             .n_hosts = std::atoi(argv[2]),
             .gbits = std::atof(argv[3]),
             .n_actors = 2,
             .are_together = false};
  for (int i = 4; i < argc; ++i) steps.push_back(step_of(argv[i]));
  for (int host = 0; host < cluster.n_hosts; ++host) {
    are_complete.push_back(s4u::Semaphore::create(0));
    are_averaged.push_back(s4u::Semaphore::create(0));
  }
  growth::simulate(simulation, cluster, run_rank);
}
