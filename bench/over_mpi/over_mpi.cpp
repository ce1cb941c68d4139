// Collectives of lockstep over MPI against plain MPI's, in one program: ./dev bench mpi
// over-mpi-MPI [--single|--hosts] BYTES..., under that MPI's mpirun. --single: the program calls
// MPI_Init, which promises one thread; otherwise lockstep does and requests MPI_THREAD_MULTIPLE.
// --hosts: also all_gather and broadcast, over the engine that several hosts get, and at most some
// seconds for each size. BYTES are of the result.
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
#include <span>
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
/// Between hosts, of all pairs of one size together.
constexpr std::chrono::seconds kMostTime{4};
constexpr int kFewestPairs = 5;

/// Microseconds per call, over n calls.
template <class Call>
double block(Call& call, int n) {
  MPI_Barrier(MPI_COMM_WORLD);
  const auto start = Clock::now();
  for (int i = 0; i < n; ++i) call();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / n;
}

/// Rank 0's.
int agreed(int value) {
  MPI_Bcast(&value, 1, MPI_INT, 0, MPI_COMM_WORLD);
  return value;
}

/// The number of calls per block, the same on all ranks.
template <class Call>
int n_calls(Call& call) {
  const int n_first = agreed(block(call, 1) > kBlockUs ? 1 : 20);
  return agreed(1 + static_cast<int>(kBlockUs / block(call, n_first)));
}

/// One block of either per pair, so that other load on the machine meets both alike.
template <class Plain, class Lockstep>
nlohmann::json compare(Plain& plain, Lockstep& lockstep, bool is_over_hosts) {
  const int n_plain = n_calls(plain);
  const int n_lockstep = n_calls(lockstep);
  std::vector<double> plain_us;
  std::vector<double> lockstep_us;
  std::vector<double> ratios;
  const auto end = Clock::now() + kMostTime;
  for (int pair = 0; pair < kPairs; ++pair) {
    if (is_over_hosts && agreed(pair >= kFewestPairs && Clock::now() > end ? 1 : 0) != 0) break;
    const bool begins = pair % 2 == 0;
    if (begins) lockstep_us.push_back(block(lockstep, n_lockstep));
    plain_us.push_back(block(plain, n_plain));
    if (!begins) lockstep_us.push_back(block(lockstep, n_lockstep));
    ratios.push_back(lockstep_us.back() / plain_us.back());
  }
  return {{"plain_us", median(plain_us)},
          {"lockstep_us", median(lockstep_us)},
          {"ratio", median(ratios)}};
}

void expect_equal(const std::vector<float>& theirs, const std::vector<float>& ours) {
  if (theirs != ours) throw std::runtime_error("the two results differ");
}

nlohmann::json all_reduce(std::size_t n_bytes, bool is_over_hosts) {
  std::vector<float> theirs(n_bytes / sizeof(float), 1);
  std::vector<float> ours = theirs;
  auto plain = [&] {
    MPI_Allreduce(MPI_IN_PLACE, theirs.data(), static_cast<int>(theirs.size()), MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
  };
  auto lockstep = [&] { lockstep::all_reduce(ours); };
  plain();
  lockstep();
  expect_equal(theirs, ours);
  std::ranges::fill(theirs, 0.0F);  // keeps the sums from growing
  std::ranges::fill(ours, 0.0F);
  return compare(plain, lockstep, is_over_hosts);
}

nlohmann::json all_gather(std::size_t n_bytes) {
  const auto n_ranks = static_cast<std::size_t>(lockstep::get_world_size());
  const std::vector<float> part(n_bytes / sizeof(float) / n_ranks,
                                static_cast<float>(lockstep::get_rank()));
  std::vector<float> theirs(part.size() * n_ranks);
  std::vector<float> ours(theirs.size());
  const int n = static_cast<int>(part.size());
  auto plain = [&] {
    MPI_Allgather(part.data(), n, MPI_FLOAT, theirs.data(), n, MPI_FLOAT, MPI_COMM_WORLD);
  };
  const lockstep::Group group = lockstep::default_group();
  auto lockstep = [&] {
    group.all_gather({part.data(), part.size(), lockstep::DType::f32},
                     {ours.data(), ours.size(), lockstep::DType::f32});
  };
  plain();
  lockstep();
  expect_equal(theirs, ours);
  return compare(plain, lockstep, /*is_over_hosts=*/true);
}

/// Each followed by MPI's barrier, because MPI's own broadcast returns before others have the data.
nlohmann::json broadcast(std::size_t n_bytes) {
  std::vector<float> theirs(n_bytes / sizeof(float), static_cast<float>(lockstep::get_rank()));
  std::vector<float> ours = theirs;
  auto plain = [&] {
    MPI_Bcast(theirs.data(), static_cast<int>(theirs.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
  };
  auto lockstep = [&] {
    lockstep::broadcast(std::span(ours));
    MPI_Barrier(MPI_COMM_WORLD);
  };
  plain();
  lockstep();
  expect_equal(theirs, ours);
  return compare(plain, lockstep, /*is_over_hosts=*/true);
}

void print(std::string_view operation, std::size_t n_bytes, nlohmann::json result) {
  if (!lockstep::is_main_process()) return;
  result["operation"] = operation;
  result["bytes"] = n_bytes;
  fmt::print("{}\n", result.dump());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    bool is_single = false, is_over_hosts = false;
    std::vector<std::size_t> sizes;
    for (int i = 1; i < argc; ++i) {
      const std::string_view argument = argv[i];
      std::size_t n_bytes = 0;
      if (argument == "--single") {
        is_single = true;
      } else if (argument == "--hosts") {
        is_over_hosts = true;
      } else if (const auto end = argument.data() + argument.size();
                 std::from_chars(argument.data(), end, n_bytes).ptr == end && n_bytes >= 4) {
        sizes.push_back(n_bytes);
      } else {
        throw std::invalid_argument("usage: over-mpi-MPI [--single|--hosts] BYTES...");
      }
    }
    ::setenv("LOCKSTEP_MPI", OVER_MPI_MODULE, /*overwrite=*/1);
    if (is_single) MPI_Init(&argc, &argv);
    lockstep::init_dist({.backend = is_over_hosts ? "auto" : "mpi"});
    if (!is_over_hosts) lockstep::bench::bind_to_core_of(lockstep::get_local_rank());
    for (const std::size_t n_bytes : sizes) {
      print("all_reduce", n_bytes, all_reduce(n_bytes, is_over_hosts));
      if (!is_over_hosts) continue;
      print("all_gather", n_bytes, all_gather(n_bytes));
      print("broadcast", n_bytes, broadcast(n_bytes));
    }
    lockstep::destroy_dist();
    if (is_single) MPI_Finalize();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
