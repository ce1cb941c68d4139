#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/futex.hpp"
#include "cli/bench/bench.hpp"

namespace lockstep::bench {
namespace {

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

/// Of /proc/stat's columns, of CPU time: user, nice, system, idle, iowait, irq, softirq, steal.
constexpr std::array<bool, 8> kIsUse = {true, true, true, false, false, true, true, true};

}  // namespace

std::chrono::nanoseconds used_cpu_time(const std::vector<int>& cores) {
  static const std::chrono::nanoseconds tick =
      std::chrono::nanoseconds(std::chrono::seconds(1)) / ::sysconf(_SC_CLK_TCK);
  std::int64_t n_ticks = 0;
  std::ifstream file("/proc/stat");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    const bool is_wanted = std::any_of(
        cores.begin(), cores.end(), [&](int core) { return name == fmt::format("cpu{}", core); });
    if (!is_wanted) continue;
    for (const bool is_use : kIsUse) {
      std::int64_t n = 0;
      words >> n;
      if (is_use) n_ticks += n;
    }
  }
  return n_ticks * tick;
}

Probe probe_placement(int core_a, int core_b, std::chrono::milliseconds duration) {
  using Clock = std::chrono::steady_clock;
  // Few, because on a busy machine each may take a time slice.
  constexpr std::uint64_t kVolleys = 25;
  Ball there;
  Ball back;
  std::vector<double> times;
  std::jthread partner([&] {
    bind_to(core_b);
    for (std::uint64_t turn = 1; await(there, turn); ++turn) {
      back.at.store(turn, std::memory_order_release);
    }
  });
  std::jthread starter([&] {
    bind_to(core_a);
    std::uint64_t turn = 0;
    const auto end = Clock::now() + duration;
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
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2),
                   times.end());
  const double one_way = times[times.size() / 2];
  // Geometric means between the three clusters observed: 25-29, 50-70 and 230-460 ns.
  const Placement placement = one_way < 38    ? Placement::siblings
                              : one_way < 127 ? Placement::near
                                              : Placement::far;
  return {one_way, placement};
}

}  // namespace lockstep::bench
