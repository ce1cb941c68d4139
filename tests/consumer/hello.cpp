#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/lockstep.hpp>

namespace {

// The sum of every rank's number, on all ranks.
bool add_up() {
  const int n = lockstep::get_world_size();
  std::vector<double> numbers(1000, lockstep::get_rank() + 1.0);
  lockstep::all_reduce(numbers);
  if (lockstep::is_main_process()) std::printf("%d ranks, sum %g\n", n, numbers.back());
  return numbers.back() == n * (n + 1) / 2.0;
}

}  // namespace

// hello: one rank, alone or of a launcher; hello mpi: of mpirun, over its MPI; hello ucx: of
// `lockstep run`, over UCX; hello threads: three ranks of its own.
int main(int argc, char** argv) {
  const std::string_view given = argc > 1 ? argv[1] : "auto";
  if (given == "threads") {
    lockstep::run_ranks(3, [] {
      if (!add_up()) throw std::runtime_error("wrong sum");
    });
    return 0;
  }
  lockstep::init_dist({.backend = std::string(given)});
  const bool right = add_up();
  lockstep::destroy_dist();
  return right ? 0 : 1;
}
