#pragma once

#include <smpi/mpi.h>

#include <simgrid/s4u/Barrier.hpp>

namespace growth {

/// What this context's module takes for MPI_COMM_WORLD, and where its ranks meet at no cost.
__attribute__((visibility("default"))) void set_world(MPI_Comm comm,
                                                      simgrid::s4u::BarrierPtr start_line);
/// Of each message, at either end.
__attribute__((visibility("default"))) void set_seconds_per_message(double seconds);

}  // namespace growth
