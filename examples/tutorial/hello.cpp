#include <cstdio>
#include <vector>

#include <lockstep/lockstep.hpp>

int main() {
  lockstep::init_dist();  // joins the other ranks; without a launcher there are none
  const int rank = lockstep::get_rank();
  const int n_ranks = lockstep::get_world_size();

  std::vector<double> values(3, rank + 1);
  lockstep::all_reduce(values);  // the sum over all ranks, on all ranks

  std::printf("rank %d of %d: the sum is %g\n", rank, n_ranks, values[0]);
}
