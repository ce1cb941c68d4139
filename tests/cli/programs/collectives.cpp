// A rank of a real job: joins the world that `lockstep run` made.
//   collectives sum       all ranks add up their numbers and print the sum
//   collectives lose R    rank R goes silent, the others wait for it; prints what they get
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <lockstep/lockstep.hpp>
#include <span>
#include <string>

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "sum";
  std::signal(SIGTERM, SIG_IGN);  // the test wants each rank's own words, however slow the machine
  try {
    lockstep::init_dist();
    const int rank = lockstep::get_rank();
    std::int64_t value = rank + 1;
    lockstep::all_reduce(std::span(&value, 1));
    if (mode == "sum") {
      std::printf("rank %d of %d: sum %ld, backend %s\n", rank, lockstep::get_world_size(),
                  static_cast<long>(value), lockstep::get_backend().value_or("none").c_str());
      return 0;
    }
    std::printf("joined: rank %d is pid %d.\n", rank, getpid());
    std::fflush(stdout);
    if (rank == std::atoi(argv[2])) {
      while (true) pause();
    }
    lockstep::all_reduce(std::span(&value, 1));
    std::printf("rank %d got through\n", rank);
  } catch (const lockstep::PeerLost& error) {
    std::printf("PeerLost: %s\n", error.what());
    return 1;
  } catch (const lockstep::Error& error) {
    std::printf("Error: %s\n", error.what());
    return 2;
  }
}
