// Cost of a SyncMaster round: messages of all slaves to the master's callback, and replies.
// bench_sync_master --benchmark_filter=round/4

#include <benchmark/benchmark.h>

#include <condition_variable>
#include <cstdint>
#include <lockstep/error.hpp>
#include <lockstep/sync.hpp>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep {
namespace {

std::vector<ReplyTo<double>> sum(std::span<MessageFrom<double>> messages) {
  double total = 0;
  for (const auto& [id, message] : messages) total += message;
  std::vector<ReplyTo<double>> replies;
  for (const auto& [id, message] : messages) replies.push_back({id, total});
  return replies;
}

void round(benchmark::State& state) {
  std::vector<SlavePipe<double, double>> pipes;
  std::vector<std::jthread> slaves;  // end when the master leaves
  SyncMaster<double, double> master(sum);
  for (int id = 1; id <= state.range(0); ++id) pipes.push_back(master.register_slave(id));
  for (auto& pipe : pipes) {
    slaves.emplace_back([&pipe] {
      try {
        for (;;) pipe.run_slave(1);
      } catch (const PeerLost&) {
      }
    });
  }
  for (auto _ : state) benchmark::DoNotOptimize(master.run_master(1));
}
BENCHMARK(round)->Arg(2)->Arg(4)->Arg(8)->Arg(32)->UseRealTime()->Unit(benchmark::kMicrosecond);

/// The same round by one mutex and one condition variable, whose lock all take on waking.
class LockedBarrier {
 public:
  explicit LockedBarrier(int n_threads) : n_threads_(n_threads) {}
  /// False once it is closed.
  bool arrive_and_wait() {
    std::unique_lock lock(mutex_);
    const auto number = number_;
    if (++n_waiting_ == n_threads_) {
      n_waiting_ = 0;
      ++number_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return number_ != number || is_closed_; });
    }
    return !is_closed_;
  }
  void close() {
    const std::scoped_lock lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
  }

 private:
  const int n_threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t number_ = 0;
  int n_waiting_ = 0;
  bool is_closed_ = false;
};

void locked_gather_and_release(benchmark::State& state) {
  LockedBarrier barrier(static_cast<int>(state.range(0)) + 1);
  std::vector<std::jthread> slaves;
  for (int id = 1; id <= state.range(0); ++id) {
    slaves.emplace_back([&] {
      while (barrier.arrive_and_wait()) {
      }
    });
  }
  for (auto _ : state) {
    barrier.arrive_and_wait();
    barrier.arrive_and_wait();
  }
  barrier.close();
}
BENCHMARK(locked_gather_and_release)
    ->Arg(2)
    ->Arg(4)
    ->Arg(8)
    ->Arg(32)
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace lockstep
