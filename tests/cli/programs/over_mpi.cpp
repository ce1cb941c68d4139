// A rank of MpiTest: makes the fault that its argument names, over the mpi engine, and says how its
// own calls ended.
#include <cstdio>
#include <lockstep/lockstep.hpp>
#include <stdexcept>
#include <string>
#include <thread>

int main(int /*argc*/, char** argv) {
  const std::string fault = argv[1];
  int rank = -1;
  try {
    lockstep::init_dist({.backend = "mpi"});
    rank = lockstep::get_rank();
    lockstep::barrier();
    if (fault == "mismatch" && rank == 2) lockstep::barrier();
    if (rank == 1) {
      if (fault == "late") std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      if (fault == "leave") {
        lockstep::destroy_dist();
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        throw std::runtime_error("has left");
      }
    }
    if (fault == "throw") {
      lockstep::main_process_first([&] {
        if (rank == 0) throw std::runtime_error("out of sheets");
      });
    }
    lockstep::all_reduce_value(rank);
    lockstep::destroy_dist();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    std::fflush(stderr);
    // The others need a moment to say theirs before mpirun ends them all.
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    return 1;
  }
  return 0;
}
