// Half a round trip between the two ranks of `lockstep run`, in microseconds: the tenth percentile
// for each size, as one line of JSON of rank 0.
//   over-ucx BACKEND
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <lockstep/lockstep.hpp>
#include <utility>
#include <vector>

int main(int /*argc*/, char** argv) {
  using Clock = std::chrono::steady_clock;
  constexpr std::pair<std::size_t, int> kRuns[] = {
      {1, 1500}, {1024, 1500}, {16384, 1500}, {65536, 400}, {1 << 20, 60}};
  lockstep::init_dist({.backend = argv[1]});
  const int rank = lockstep::get_rank();
  std::printf(rank == 0 ? "{" : "");
  for (const auto& [n_bytes, n_times] : kRuns) {
    std::vector<std::byte> data(n_bytes);
    std::vector<double> halves;
    for (int i = 0; i < n_times; ++i) {
      const auto start = Clock::now();
      for (const int sender : {0, 1}) {
        if (rank == sender) {
          lockstep::default_group().send({data.data(), n_bytes, lockstep::DType::u8}, 1 - rank);
        } else {
          lockstep::default_group().recv({data.data(), n_bytes, lockstep::DType::u8}, 1 - rank);
        }
      }
      halves.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() / 2);
    }
    std::ranges::sort(halves);
    if (rank == 0) {
      std::printf("%s\"%zu\": %.2f", n_bytes == 1 ? "" : ", ", n_bytes, halves[halves.size() / 10]);
    }
  }
  std::printf(rank == 0 ? "}\n" : "");
  lockstep::destroy_dist();
}
