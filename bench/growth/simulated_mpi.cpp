// The mpi engine's own module, compiled against SimGrid's MPI with changes for simulation:
// ranks are contexts of one process, so each sets which ranks form its world; a context blocks
// instead of polling, because polling takes the simulator hours and costs no simulated time; each
// message costs its rank some time, which SimGrid's flows do not model; no control message is
// polled for, because no rank fails and each MPI_Iprobe takes simulated time; and nothing is done
// in MPI_Finalize, because SimGrid allows no calls there.
#include <smpi/mpi.h>

#include <map>
#include <simgrid/s4u/Actor.hpp>
#include <utility>

#include "simulated_mpi.hpp"

namespace growth {
namespace {

struct World {
  MPI_Comm comm;
  simgrid::s4u::BarrierPtr start_line;
};
std::map<aid_t, World> worlds;  // by context
double seconds_per_message = 0;

World& world() { return worlds.at(simgrid::s4u::this_actor::get_pid()); }

/// Sequentially: SimGrid's MPI_Waitall takes quadratic time.
int wait_all(int n, MPI_Request* requests, int* flag, MPI_Status* /*statuses*/) {
  *flag = 1;
  for (int i = 0; i < n; ++i) {
    if (const int code = MPI_Wait(&requests[i], MPI_STATUS_IGNORE); code != MPI_SUCCESS)
      return code;
  }
  return MPI_SUCCESS;
}

int set_no_attribute(MPI_Comm, int, void*) { return MPI_SUCCESS; }

}  // namespace

void set_world(MPI_Comm comm, simgrid::s4u::BarrierPtr start_line) {
  worlds[simgrid::s4u::this_actor::get_pid()] = {comm, std::move(start_line)};
}
void set_seconds_per_message(double seconds) { seconds_per_message = seconds; }

}  // namespace growth

#define MPI_COMM_WORLD growth::world().comm
#define MPI_Testall growth::wait_all
#define MPI_Comm_set_attr growth::set_no_attribute
#define lockstep_mpi lockstep_mpi_without_cost
#include "engines/mpi/module/mpi_exchange.cpp"  // NOLINT
#include "engines/mpi/module/mpi_module.cpp"    // NOLINT: compiled here on purpose
#undef lockstep_mpi

extern "C" __attribute__((visibility("default"))) const LockstepMpi* lockstep_mpi() {
  static const LockstepMpi table = [] {
    LockstepMpi changed = *lockstep_mpi_without_cost();
    changed.one_thread = [](std::int32_t*) -> const char* { return nullptr; };  // contexts of one
    // Ranks do not poll, so cores are not queried.
    changed.host_ranks = [](std::uint64_t*, std::size_t, int* n_ranks) {
      *n_ranks = 1;
      return int{MPI_SUCCESS};
    };
    // Flows that begin together are solved together: 256 ranks take seconds, not hours.
    changed.world = [](std::int32_t number, void** group, std::int32_t* last_number) {
      const int code = lockstep_mpi_without_cost()->world(number, group, last_number);
      growth::world().start_line->wait();
      return code;
    };
    changed.transport.poll_control = [](void*, void*, std::size_t, std::int32_t* has_arrived) {
      *has_arrived = 0;
      return int{MPI_SUCCESS};
    };
    changed.transport.begin = [](void* handle, const lockstep::message::Message* messages,
                                 std::size_t n_messages, void** exchange) {
      simgrid::s4u::this_actor::sleep_for(static_cast<double>(n_messages) *
                                          growth::seconds_per_message);
      return lockstep_mpi_without_cost()->transport.begin(handle, messages, n_messages, exchange);
    };
    return changed;
  }();
  return &table;
}
