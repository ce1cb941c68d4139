#include "cli/bench/bench.hpp"
#include "cli/bench/lockstep.hpp"

namespace lockstep::bench {
namespace {

/// Bytes on the wire per byte of the buffer, as defined by nccl-tests.
double bus_factor(Operation operation, int n_ranks) {
  const double n = n_ranks;
  switch (operation) {
    case Operation::barrier: return 0;
    case Operation::all_reduce: return 2 * (n - 1) / n;
    case Operation::broadcast: return 1;
    case Operation::all_gather:
    case Operation::reduce_scatter:
    case Operation::all_to_all: return (n - 1) / n;
  }
  return 0;
}

}  // namespace

std::vector<Row> measure(const Group& group, const Plan& plan, bool of_threads) {
  Lockstep lockstep(group, of_threads);
  Meter meter(lockstep, group.rank(), group.size());
  const auto times_of = [&](const Request& request) {
    const std::vector<double> own = meter.measure(request);
    std::vector<double> all(own.size() * static_cast<std::size_t>(group.size()));
    group.all_gather({own.data(), own.size(), DType::f64}, {all.data(), all.size(), DType::f64});
    return all;
  };
  std::vector<Row> rows;
  for (const Operation operation : plan.operations) {
    for (const std::uint64_t n_bytes : plan.sizes) {
      Request request{operation, plan.type, plan.mode, plan.in_shared_memory, n_bytes};
      times_of(request);  // warms up
      request.ns_per_call = quantile(times_of(request), 0.5);
      request.block_ns = static_cast<double>(std::chrono::nanoseconds(plan.block_time).count());
      std::vector<double> p50;
      std::vector<double> p99;
      for (int i = 0; i < plan.n_blocks; ++i) {
        const std::vector<double> times = times_of(request);
        p50.push_back(quantile(times, 0.5) / 1e3);
        p99.push_back(quantile(times, 0.99) / 1e3);
      }
      const double p50_us = quantile(p50, 0.5);
      const double gb_s = static_cast<double>(n_bytes) / p50_us / 1e3;
      rows.push_back({operation, n_bytes, of_threads, p50_us, quantile(p99, 0.5), gb_s,
                      gb_s * bus_factor(operation, group.size())});
      if (operation == Operation::barrier) break;
    }
  }
  return rows;
}

}  // namespace lockstep::bench
