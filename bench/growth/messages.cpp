// Messages and bytes of calls between hosts, over threads: ./dev bench growth --messages
// growth_messages mpi|hierarchical HOSTS...
//
// mpi: the message engine with one rank per host. hierarchical: four ranks per host. For each
// operation and size a line of OPERATION BYTES, then MESSAGES BYTES for each number of hosts: what
// the host with the most of them sends to others or receives from them in a call.

#include <fmt/format.h>

#include <barrier>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <lockstep/engine.hpp>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "engines/hierarchical/hierarchical.hpp"
#include "engines/message/message_engine.hpp"
#include "support/message_network.hpp"

namespace {

using lockstep::DType;
using lockstep::Engine;
using lockstep::Op;
using lockstep::test::MessageNetwork;
using lockstep::test::Traffic;

constexpr int kRanksPerHost = 4;

struct Counted {
  Op op;
  std::size_t n_bytes;  ///< of a rank's part, or of the result of all_reduce, reduce, broadcast
};
constexpr Counted kCounted[] = {
    {Op::barrier, 0},           {Op::all_reduce, 4},       {Op::all_reduce, 1 << 10},
    {Op::all_reduce, 64 << 10}, {Op::reduce, 4},           {Op::reduce, 64 << 10},
    {Op::broadcast, 4},         {Op::broadcast, 64 << 10}, {Op::all_gather, 4},
    {Op::all_gather, 1 << 10},  {Op::gather, 4},           {Op::gather, 1 << 10},
    {Op::scatter, 4},           {Op::scatter, 1 << 10},    {Op::reduce_scatter, 4},
    {Op::reduce_scatter, 1024}, {Op::all_to_all, 4},       {Op::all_to_all, 1 << 10},
};

/// The moments of SyncBatchNorm.
constexpr std::size_t kChannels = 64;
constexpr Counted kMoments = {Op::all_reduce,
                              kChannels* lockstep::size_of(lockstep::detail::kMoments)};
constexpr Counted kCountedByHost[] = {
    {Op::barrier, 0},          {Op::all_reduce, 4},       {Op::all_reduce, 64 << 10},
    {Op::broadcast, 64 << 10}, {Op::all_gather, 4},       {Op::all_gather, 1 << 10},
    {Op::gather, 4},           {Op::gather, 1 << 10},     {Op::scatter, 4},
    {Op::scatter, 1 << 10},    {Op::reduce_scatter, 4},   {Op::reduce_scatter, 1 << 10},
    {Op::all_to_all, 4},       {Op::all_to_all, 1 << 10},
};

void run(Engine& engine, const Counted& counted) {
  const Op op = counted.op;
  const bool is_in_place =
      op == Op::all_reduce || op == Op::reduce || op == Op::broadcast || op == Op::barrier;
  const bool is_of_moments = counted.n_bytes == kMoments.n_bytes && op == kMoments.op;
  const std::size_t n = counted.n_bytes / sizeof(float);
  const std::size_t n_all = is_in_place ? n : n * static_cast<std::size_t>(engine.size());
  std::vector<float> in(is_in_place || op == Op::all_gather || op == Op::gather ? n : n_all);
  std::vector<float> out(op == Op::scatter || op == Op::reduce_scatter ? n : n_all);
  lockstep::Call call;
  call.op = op;
  call.dtype = is_of_moments ? lockstep::detail::kMoments : DType::f32;
  call.count = counted.n_bytes / size_of(call.dtype);
  call.root = 0;
  call.out = out.data();
  call.in = is_in_place ? out.data() : in.data();
  call.timeout = std::chrono::minutes(60);
  engine.run(call);
}

Traffic count(const Counted& counted, int n_hosts) {
  MessageNetwork network(n_hosts);
  lockstep::test::run_message_ranks(
      n_hosts, [&](Engine& engine) { run(engine, counted); }, &network);
  return network.most();
}

/// Of each host's ranks together.
Traffic count_by_host(const Counted& counted, int n_hosts) {
  const int n = n_hosts * kRanksPerHost;
  std::vector<int> hosts;
  for (int r = 0; r < n; ++r) hosts.push_back(r - r % kRanksPerHost);
  MessageNetwork network(n);
  std::barrier all(n);
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < n; ++rank) {
    ranks.emplace_back([&, rank] {
      lockstep::Call barrier;
      barrier.timeout = std::chrono::minutes(60);
      const auto engine = lockstep::hierarchical::make(
          lockstep::message::make("network", network.transport(rank)), hosts, barrier);
      all.arrive_and_wait();
      if (rank == 0) network.reset_traffic();
      all.arrive_and_wait();
      run(*engine, counted);
      all.arrive_and_wait();
    });
  }
  ranks.clear();
  return network.most(hosts);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string_view mode = argc > 1 ? argv[1] : "";
    if (mode != "mpi" && mode != "hierarchical") {
      throw std::invalid_argument("usage: growth_messages mpi|hierarchical HOSTS...");
    }
    const auto print = [&](std::string_view name, const Counted& counted) {
      fmt::print("{} {}", name, counted.n_bytes);
      for (int i = 2; i < argc; ++i) {
        const int n_hosts = std::atoi(argv[i]);
        const Traffic most =
            mode == "mpi" ? count(counted, n_hosts) : count_by_host(counted, n_hosts);
        fmt::print(" {} {}", most.n_messages, most.n_bytes);
      }
      fmt::print("\n");
    };
    if (mode == "mpi") {
      for (const Counted& counted : kCounted) print(lockstep::name_of(counted.op), counted);
    } else {
      for (const Counted& counted : kCountedByHost) print(lockstep::name_of(counted.op), counted);
      print("statistics", kMoments);
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "growth_messages: {}\n", error.what());
    return 1;
  }
}
