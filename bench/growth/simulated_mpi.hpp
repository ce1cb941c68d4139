#pragma once

#include <smpi/mpi.h>

#include <simgrid/s4u/Barrier.hpp>

namespace growth {

/// This context's replacement for MPI_COMM_WORLD, and a barrier for its ranks without cost.
__attribute__((visibility("default"))) void set_world(MPI_Comm comm,
                                                      simgrid::s4u::BarrierPtr start_line);
/// Per message, at the sender and at the receiver.
__attribute__((visibility("default"))) void set_seconds_per_message(double seconds);

}  // namespace growth
