// lockstep's own side of bench/compare: a rank that `lockstep run` starts, or N ranks that are
// threads. Not for use by hand.
#include <cstdio>
#include <cstdlib>
#include <lockstep/sync_master.hpp>
#include <lockstep/world.hpp>

#include "cli/bench/lockstep.hpp"
#include "protocol.hpp"
#include "world/environment.hpp"

namespace {

using namespace lockstep;

void serve(bench::Rank& rank, bool of_threads) {
  bench::Lockstep library(default_group(), of_threads);
  rank.serve(library);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) return std::fprintf(stderr, "a part of bench/compare\n"), 2;
  const std::string socket = argv[argc - 1];
  try {
    if (argc == 3) {
      const int n_ranks = std::atoi(argv[1]);
      run_ranks(n_ranks, [&] {
        bench::Rank rank(socket, get_rank(), n_ranks);
        serve(rank, /*of_threads=*/true);
      });
    } else {
      const internal::World world = internal::read_world(Launcher::lockstep);
      bench::Rank rank(socket, world.rank, world.size);
      init_dist();  // after the rank has bound itself: the engine looks at the cores
      serve(rank, /*of_threads=*/false);
      destroy_dist();
    }
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
  }
  return 0;
}
