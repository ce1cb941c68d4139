// The distance between two cores, for compare.py: after each line on stdin writes the time that a
// cache line takes from one to the other, in ns, measured for 10 ms.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "base/futex.hpp"
#include "cli/bench/meter.hpp"

namespace {

using namespace lockstep;
using Clock = std::chrono::steady_clock;

struct alignas(128) Ball {
  std::atomic<std::uint64_t> at{0};
};

/// Waits for `turn`; false once the other side has stopped.
bool await(const Ball& ball, std::uint64_t turn) {
  while (true) {
    const std::uint64_t at = ball.at.load(std::memory_order_acquire);
    if (at == turn) return true;
    if (at == ~std::uint64_t{0}) return false;
    base::cpu_relax();
  }
}

double one_way_ns(int core_a, int core_b) {
  // Few, because on a busy machine each may take a time slice.
  constexpr std::uint64_t kVolleys = 25;
  Ball there;
  Ball back;
  std::vector<double> times;
  std::jthread partner([&] {
    bench::bind_to(core_b);
    for (std::uint64_t turn = 1; await(there, turn); ++turn) {
      back.at.store(turn, std::memory_order_release);
    }
  });
  std::jthread starter([&] {
    bench::bind_to(core_a);
    std::uint64_t turn = 0;
    const auto end = Clock::now() + std::chrono::milliseconds(10);
    while (Clock::now() < end) {
      const auto begin = Clock::now();
      for (std::uint64_t i = 0; i < kVolleys; ++i) {
        there.at.store(++turn, std::memory_order_release);
        await(back, turn);
      }
      const std::chrono::duration<double, std::nano> taken = Clock::now() - begin;
      times.push_back(taken.count() / (2.0 * kVolleys));
    }
    there.at.store(~std::uint64_t{0}, std::memory_order_release);
  });
  starter.join();
  partner.join();
  return bench::quantile(times, 0.5);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "a part of bench/compare\n"), 2;
  while (std::getchar() != EOF) {
    std::printf("%f\n", one_way_ns(std::atoi(argv[1]), std::atoi(argv[2])));
    std::fflush(stdout);
  }
}
