// Work: an all_reduce runs while this rank computes.
#include <cstdio>
#include <numeric>
#include <vector>

#include <lockstep/lockstep.hpp>

int main() {
  lockstep::init_dist();
  const int rank = lockstep::get_rank();

  std::vector<double> gradients(1'000'000, rank + 1.0);
  lockstep::Work work = lockstep::all_reduce_async(gradients, lockstep::ReduceOp::mean);

  std::vector<int> other(1000);  // meanwhile, anything that leaves `gradients` alone
  std::iota(other.begin(), other.end(), rank);

  work.wait();  // throws what the all_reduce would have thrown
  std::printf("rank %d: mean %g, and %zu numbers of its own\n", rank, gradients[0], other.size());
}
