#include <cstdio>
#include <lockstep/lockstep.hpp>
#include <thread>
#include <vector>

#include "thread_engine.hpp"

// Four ranks, the threads of this process, over the engine of this folder.
int main() {
  constexpr int kRanks = 4;
  const auto state = example::make_shared_state(kRanks);
  std::vector<double> sums(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      // The default group of this thread, while `scope` lives.
      const lockstep::GroupScope scope(
          lockstep::Group(example::join(state, rank), "world", std::chrono::seconds(30)));
      sums[static_cast<std::size_t>(rank)] = lockstep::all_reduce_value(rank + 1.0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < kRanks; ++rank) {
    std::printf("rank %d: sum %g\n", rank, sums[static_cast<std::size_t>(rank)]);
  }
  return sums == std::vector<double>(kRanks, 10) ? 0 : 1;
}
