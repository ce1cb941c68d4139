// A rank of a job over several hosts.
//   hosts BACKEND
// sums numbers up, in calls of several sizes; rank 0 prints the backend, the sum, how many ranks
// are here, how often a large all_reduce's data left this host through a network, and its time
//   hosts BACKEND FOLDER
// leaves RANK.ready in FOLDER, and when there is a file `go` sums up; what the rank was told is in
// RANK.said
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <lockstep/lockstep.hpp>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/waiting.hpp"

namespace {

/// Bytes that this network namespace has sent, but for those to itself.
std::uint64_t bytes_sent() {
  std::ifstream table("/proc/net/dev");
  std::uint64_t sum = 0;
  for (std::string line; std::getline(table, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || line.find(" lo:") != std::string::npos) continue;
    std::istringstream fields(line.substr(colon + 1));
    std::uint64_t field = 0;
    for (int i = 0; i < 9; ++i) fields >> field;
    sum += field;
  }
  return sum;
}

/// All_reduces for which networks ask different algorithms.
void sum_up_little_data() {
  const int n = lockstep::get_world_size();
  for (const std::size_t count : {1U, 100U, 1000U, 5000U}) {
    std::vector<float> values(count, static_cast<float>(lockstep::get_rank() + 1));
    lockstep::all_reduce(std::span(values));
    const auto sum = static_cast<float>(n * (n + 1) / 2);
    if (values != std::vector<float>(count, sum)) {
      throw std::runtime_error("the sum of " + std::to_string(count) + " numbers is wrong");
    }
  }
}

void sum_up_later(const std::string& folder) {
  const std::string path = folder + "/" + std::to_string(lockstep::get_rank());
  std::string text = "no error";
  lockstep::barrier();
  std::ofstream(path + ".ready").close();
  lockstep::test::wait_until([&] { return std::filesystem::exists(folder + "/go"); });
  try {
    int value = 1;
    lockstep::default_group().all_reduce({&value, 1, lockstep::DType::i32}, lockstep::ReduceOp::sum,
                                         std::chrono::seconds(2));
  } catch (const lockstep::Error& error) {
    text = error.what();
  }
  std::ofstream(path + ".part") << text;
  std::filesystem::rename(path + ".part", path + ".said");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    lockstep::init_dist({.backend = argv[1]});
    if (argc > 2) {
      sum_up_later(argv[2]);
      return 1;
    }
    sum_up_little_data();
    std::vector<float> values(1U << 20U, 1.0F);
    lockstep::barrier();
    const std::uint64_t before = bytes_sent();
    const auto start = std::chrono::steady_clock::now();
    constexpr int kTimes = 4;
    for (int i = 0; i < kTimes; ++i) lockstep::all_reduce(std::span(values));
    lockstep::barrier();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    const double n_bytes = static_cast<double>(bytes_sent() - before);
    if (lockstep::get_rank() == 0) {
      std::printf("%s sum %.0f local %d of %d sent %.2f in %.0f ms\n",
                  lockstep::get_backend()->c_str(), static_cast<double>(values.back()),
                  lockstep::get_local_size(), lockstep::get_world_size(),
                  n_bytes / kTimes / static_cast<double>(values.size() * sizeof(float)),
                  time.count() / kTimes * 1000);
    }
    lockstep::destroy_dist();
  } catch (const std::exception& error) {
    std::printf("Error: %s\n", error.what());
    return 2;
  }
}
