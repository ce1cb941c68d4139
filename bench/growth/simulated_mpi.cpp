// The mpi engine's own module, compiled against SimGrid's MPI with three changes that a simulation
// needs: ranks are contexts of one process, so each says which ranks are its world; a context waits
// instead of polling, for to poll costs the simulator hours and the simulated rank nothing; and
// each message costs its rank some time, which SimGrid's flows do not.
#include <smpi/mpi.h>

#include <map>
#include <simgrid/s4u/Actor.hpp>

#include "simulated_mpi.hpp"

namespace growth {
namespace {

std::map<aid_t, MPI_Comm> worlds;  // by context; only those that have chosen another
double seconds_per_message = 0;

MPI_Comm world() {
  const auto found = worlds.find(simgrid::s4u::this_actor::get_pid());
  return found == worlds.end() ? MPI_COMM_WORLD : found->second;
}

/// One after the other: SimGrid's MPI_Waitall takes time by the square of their number.
int wait_all(int n, MPI_Request* requests, int* flag, MPI_Status* /*statuses*/) {
  *flag = 1;
  for (int i = 0; i < n; ++i) {
    if (const int code = MPI_Wait(&requests[i], MPI_STATUS_IGNORE); code != MPI_SUCCESS)
      return code;
  }
  return MPI_SUCCESS;
}

}  // namespace

void set_world(MPI_Comm comm) { worlds[simgrid::s4u::this_actor::get_pid()] = comm; }
void set_seconds_per_message(double seconds) { seconds_per_message = seconds; }

}  // namespace growth

#define MPI_COMM_WORLD growth::world()
#define MPI_Testall growth::wait_all
#define lockstep_mpi lockstep_mpi_without_cost
#include "engines/mpi/module/module.cpp"
#undef lockstep_mpi

extern "C" __attribute__((visibility("default"))) const LockstepMpi* lockstep_mpi() {
  static const LockstepMpi table = [] {
    LockstepMpi changed = *lockstep_mpi_without_cost();
    changed.begin = [](void* handle, const LockstepMpiMessage* messages, std::size_t n_messages,
                       void** exchange) {
      simgrid::s4u::this_actor::sleep_for(static_cast<double>(n_messages) *
                                          growth::seconds_per_message);
      return begin(handle, messages, n_messages, exchange);
    };
    return changed;
  }();
  return &table;
}
