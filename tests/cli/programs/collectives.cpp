// A rank of a real job: joins the world that `lockstep run` made.
//   collectives sum       all ranks add up their numbers and print the sum
//   collectives alone     ends without joining
//   collectives lose R    rank R goes silent, the others wait for it; prints what they get
//   collectives die R     rank R kills itself, the others wait for it; prints what they get
//   collectives differ R  rank R calls barrier where the others add up
//   collectives size R    rank R sends rank 0 more than that takes, and all others return
//   collectives refuse R  rank R's all_reduce has no data, and it calls barrier next
//   collectives read R    rank R reads a line while the others wait for it, and prints it
//   collectives stop|loop|exit|throw R   rank R stops itself, loops, leaves or throws while the
//                         others wait for it, for half a second
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <lockstep/lockstep.hpp>
#include <span>
#include <stdexcept>
#include <string>

namespace {

/// What rank R does while its peers wait.
void misbehave(const std::string& mode) {
  if (mode == "refuse") {
    try {
      lockstep::default_group().all_reduce({nullptr, 1, lockstep::DType::i64});
    } catch (const lockstep::UsageError&) {
    }
  }
  if (mode == "differ" || mode == "refuse") lockstep::barrier();
  if (mode == "lose" || mode == "linger") {
    while (true) pause();
  }
  if (mode == "read") {
    std::array<char, 256> line{};
    std::printf("rank %d read %s", lockstep::get_rank(),
                std::fgets(line.data(), line.size(), stdin) != nullptr ? line.data() : "nothing\n");
    std::fflush(stdout);
  }
  if (mode == "die") std::raise(SIGKILL);
  if (mode == "stop") std::raise(SIGSTOP);
  if (mode == "loop") {
    for (std::atomic<unsigned> n = 0;; ++n) {
    }
  }
  if (mode == "exit") std::exit(0);
  if (mode == "throw") throw std::runtime_error("the disk is full");  // which main does not catch
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "sum";
  if (mode == "alone") return 0;
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
    if (mode == "size") {
      std::array<std::int64_t, 2> values{};
      if (rank == std::atoi(argv[2])) lockstep::send(values, 0);
      if (rank == 0) lockstep::recv(std::span(&value, 1), std::atoi(argv[2]));
      return 0;
    }
    if (rank == std::atoi(argv[2])) misbehave(mode);
    if (mode == "linger") {  // after a call that failed
      try {
        lockstep::barrier(lockstep::default_group(), std::chrono::milliseconds(200));
      } catch (const lockstep::TimeoutError&) {
        std::printf("lingers\n");
        std::fflush(stdout);
        while (true) pause();
      }
    }
    if (mode == "lose" || mode == "die" || mode == "differ" || mode == "refuse" || mode == "read") {
      lockstep::all_reduce(std::span(&value, 1));
    } else {
      lockstep::barrier(lockstep::default_group(), std::chrono::milliseconds(500));
    }
    std::printf("rank %d got through\n", rank);
  } catch (const lockstep::PeerLost& error) {
    std::printf("PeerLost: %s\n", error.what());
    return 1;
  } catch (const lockstep::PeerFailed& error) {
    std::printf("PeerFailed: %s\n", error.what());
    return 1;
  } catch (const lockstep::Error& error) {
    std::printf("Error: %s\n", error.what());
    return 2;
  }
}
