// SharedBuffer: memory that all ranks of the host can access, so that collectives do not copy it
// in and out.
#include <cstdio>
#include <numeric>
#include <span>

#include <lockstep/lockstep.hpp>

int main() {
  lockstep::init_dist();
  const int rank = lockstep::get_rank();

  // All ranks allocate; the memory is zero at first.
  const auto buffer = lockstep::default_group().allocate(1'000'000 * sizeof(float));
  const std::span<float> values = buffer.as<float>();
  std::iota(values.begin(), values.begin() + 10, static_cast<float>(rank));

  lockstep::all_reduce(values);
  std::printf("rank %d: the sums are %g, %g, ...\n", rank, values[0], values[1]);
}
