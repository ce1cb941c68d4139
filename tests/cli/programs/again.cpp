// A rank that leaves its world and joins another one.
//   again rounds N     joins N worlds; prints the sum of each
//   again exit R       rank R ends after the first world, the others ask for another one
//   again stay R FILE  rank R lives on without asking, until the others have said how they fared
//   again late FILE    rank 1 asks when the limit of rank 0 has passed; then both meet
//   again kill R       rank R dies in the second world
//   again fork         a fork of rank 0 asks too
//   again group        rank 0 calls on a group of the first world in the second
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <lockstep/lockstep.hpp>
#include <string>

#include "support/waiting.hpp"

namespace {

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

void await(const char* file) {
  lockstep::test::wait_until([file] { return std::filesystem::exists(file); });
}

long n_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return std::distance(begin(files), end(files));
}

void say_sum(int round) {
  say("round " + std::to_string(round) + ": rank " + std::to_string(lockstep::get_rank()) +
      " sum " + std::to_string(lockstep::all_reduce_value(lockstep::get_rank() + 1)) + " " +
      lockstep::get_backend().value_or("none"));
}

void join_worlds(int n) {
  long n_at_first = 0;
  for (int round = 0; round < n; ++round) {
    lockstep::init_dist();
    say_sum(round);
    lockstep::destroy_dist();
    if (round == 1) n_at_first = n_files();
  }
  if (n > 2 && n_files() != n_at_first) say("descriptors leak");
}

template <class Body>
void say_error(const Body& body) {
  try {
    body();
  } catch (const lockstep::Error& error) {
    say(error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  using std::chrono::milliseconds;
  const std::string mode = argv[1];
  const int rank = std::atoi(std::getenv("RANK"));
  const bool is_it = argc > 2 && rank == std::atoi(argv[2]);
  try {
    if (mode == "rounds") {
      join_worlds(std::atoi(argv[2]));
      return 0;
    }
    lockstep::init_dist();
    const lockstep::Group first = lockstep::default_group();
    say_sum(0);
    lockstep::destroy_dist();
    if (mode == "exit" && is_it) return 0;
    if (mode == "exit") say_error([] { lockstep::init_dist(); });
    if (mode == "stay" && is_it) await(argv[3]);
    if (mode == "stay" && !is_it) {
      say_error([] { lockstep::init_dist({.timeout = milliseconds(500)}); });
      std::ofstream(argv[3]).flush();
    }
    if (mode == "late") {
      if (rank == 0) say_error([] { lockstep::init_dist({.timeout = milliseconds(300)}); });
      if (rank == 0) std::ofstream(argv[2]).flush();
      if (rank == 1) await(argv[2]);
      lockstep::init_dist();
      say_sum(1);
    }
    if (mode == "kill") {
      lockstep::init_dist();
      say_sum(1);
      if (is_it) std::raise(SIGKILL);
      lockstep::barrier();
    }
    if (mode == "fork") {
      if (rank == 0) {
        const pid_t child = fork();
        if (child == 0) {
          say_error([] { lockstep::init_dist(); });
          std::_Exit(0);
        }
        waitpid(child, nullptr, 0);
      }
      lockstep::init_dist();
      say_sum(1);
    }
    if (mode == "group") {
      lockstep::init_dist();
      if (rank == 0) say_error([&first] { lockstep::barrier(first); });
      say_sum(1);
    }
  } catch (const lockstep::Error& error) {
    say(error.what());
    return 1;
  }
}
