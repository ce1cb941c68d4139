// all_reduce over the mpi engine against plain MPI_Allreduce, in one program: ./dev bench mpi
// over-mpi-MPI [--single] BYTES..., under that MPI's mpirun. --single: the program calls MPI_Init,
// which promises one thread; otherwise lockstep does and requests MPI_THREAD_MULTIPLE.
#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <lockstep/lockstep.hpp>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "../common.hpp"

namespace {

using lockstep::bench::median;
using Clock = std::chrono::steady_clock;

/// Long compared with a barrier and a clock read, short compared with other activity.
constexpr double kBlockUs = 4000;
constexpr int kPairs = 201;

/// Microseconds per call, over n calls.
template <class Call>
double block(Call& call, int n) {
  MPI_Barrier(MPI_COMM_WORLD);
  const auto start = Clock::now();
  for (int i = 0; i < n; ++i) call();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / n;
}

/// The number of calls per block, the same on all ranks.
template <class Call>
int n_calls(Call& call) {
  block(call, 20);
  int n = 1 + static_cast<int>(kBlockUs / block(call, 20));
  MPI_Bcast(&n, 1, MPI_INT, 0, MPI_COMM_WORLD);
  return n;
}

nlohmann::json measure(std::size_t n_bytes) {
  std::vector<float> theirs(n_bytes / sizeof(float), 1);
  std::vector<float> ours = theirs;
  auto plain = [&] {
    MPI_Allreduce(MPI_IN_PLACE, theirs.data(), static_cast<int>(theirs.size()), MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
  };
  auto lockstep = [&] { lockstep::all_reduce(ours); };
  plain();
  lockstep();
  if (theirs != ours) throw std::runtime_error("the two results differ");
  std::ranges::fill(theirs, 0.0F);  // keeps the sums from growing
  std::ranges::fill(ours, 0.0F);

  const int n_plain = n_calls(plain);
  const int n_lockstep = n_calls(lockstep);
  std::vector<double> plain_us;
  std::vector<double> lockstep_us;
  std::vector<double> ratios;
  for (int pair = 0; pair < kPairs; ++pair) {
    const bool begins = pair % 2 == 0;
    if (begins) lockstep_us.push_back(block(lockstep, n_lockstep));
    plain_us.push_back(block(plain, n_plain));
    if (!begins) lockstep_us.push_back(block(lockstep, n_lockstep));
    ratios.push_back(lockstep_us.back() / plain_us.back());
  }
  return {{"bytes", n_bytes},
          {"plain_us", median(plain_us)},
          {"lockstep_us", median(lockstep_us)},
          {"ratio", median(ratios)}};
}

}  // namespace

int main(int argc, char** argv) {
  try {
    bool is_single = false;
    std::vector<std::size_t> sizes;
    for (int i = 1; i < argc; ++i) {
      const std::string_view argument = argv[i];
      std::size_t n_bytes = 0;
      if (argument == "--single") {
        is_single = true;
      } else if (const auto end = argument.data() + argument.size();
                 std::from_chars(argument.data(), end, n_bytes).ptr == end && n_bytes >= 4) {
        sizes.push_back(n_bytes);
      } else {
        throw std::invalid_argument("usage: over-mpi-MPI [--single] BYTES...");
      }
    }
    ::setenv("LOCKSTEP_MPI", OVER_MPI_MODULE, /*overwrite=*/1);
    if (is_single) MPI_Init(&argc, &argv);
    lockstep::init_dist({.backend = "mpi"});
    lockstep::bench::bind_to_core_of(lockstep::get_local_rank());
    for (const std::size_t n_bytes : sizes) {
      const nlohmann::json result = measure(n_bytes);
      if (lockstep::is_main_process()) fmt::print("{}\n", result.dump());
    }
    lockstep::destroy_dist();
    if (is_single) MPI_Finalize();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
