// Group::split: the ranks as a grid of rows of two, with sums over rows and over columns.
#include <cstdio>

#include <lockstep/lockstep.hpp>

int main() {
  lockstep::init_dist();
  const int rank = lockstep::get_rank();
  const lockstep::Group& world = lockstep::default_group();

  const lockstep::Group row = world.split(/*color=*/rank / 2);
  const lockstep::Group column = world.split(/*color=*/rank % 2);
  const int row_sum = row.all_reduce_value(rank);
  const int column_sum = column.all_reduce_value(rank);

  std::printf("rank %d is rank %d of its row and %d of its column; sums %d and %d\n", rank,
              row.rank(), column.rank(), row_sum, column_sum);
}
