#pragma once

#include <smpi/mpi.h>

namespace growth {

/// What this context's module takes for MPI_COMM_WORLD.
__attribute__((visibility("default"))) void set_world(MPI_Comm comm);
/// Of each message, at either end.
__attribute__((visibility("default"))) void set_seconds_per_message(double seconds);

}  // namespace growth
