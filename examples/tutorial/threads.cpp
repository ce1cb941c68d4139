#include <cstdio>

#include <lockstep/lockstep.hpp>

int main() {
  lockstep::run_ranks(4, [](int rank) {
    const int sum = lockstep::all_reduce_value(rank + 1);
    const int largest = lockstep::all_reduce_value(rank + 1, lockstep::ReduceOp::max);
    std::printf("thread %d: the sum is %d, the maximum %d\n", rank, sum, largest);
  });
}
