// A rank of MpiTest: makes the fault that its first argument names, over the mpi engine or the one
// that a third argument names, and says how its own calls ended. mpirun ends all ranks when the
// first fails, so each waits until all three have left a file in the folder of the second argument.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <lockstep/lockstep.hpp>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

std::size_t n_files(const std::string& folder) {
  std::size_t n = 0;
  for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(folder)) ++n;
  return n;
}

void wait_until_all_have_said(const std::string& folder, int rank) {
  std::ofstream(folder + "/" + std::to_string(rank)) << "said";
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (n_files(folder) < 3 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string fault = argv[1];
  const std::string backend = argc > 3 ? argv[3] : "mpi";
  int rank = -1;
  try {
    lockstep::init_dist({.backend = backend});
    rank = lockstep::get_rank();
    lockstep::barrier();
    if (fault == "mismatch" && rank == 2) lockstep::barrier();
    if (fault == "conditional" && rank == 0) lockstep::barrier();
    if (fault == "conditional") lockstep::barrier();
    if (rank == 1) {
      if (fault == "late") std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      if (fault == "leave") {
        lockstep::destroy_dist();
        throw std::runtime_error("has left");
      }
    }
    if (fault == "throw") {
      lockstep::main_process_first([&] {
        if (rank == 0) throw std::runtime_error("out of sheets");
      });
    }
    lockstep::all_reduce_value(rank);
    lockstep::barrier();  // a late rank finds the others' data, but nobody any more
    lockstep::destroy_dist();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    std::fflush(stderr);
    if (argc > 2) wait_until_all_have_said(argv[2], rank);
    // mpirun may lose what a rank wrote just before it failed.
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    return 1;
  }
  return 0;
}
