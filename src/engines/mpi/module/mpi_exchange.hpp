#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engines/message/message.hpp"

/// The messages of one step, as MPI's requests. Functions that return int return an MPI error code.
namespace lockstep::mpi_module {

/// Where the messages of a group go.
struct Route {
  MPI_Comm comm = MPI_COMM_NULL;
  int tag = 0;
  std::vector<std::int32_t> ranks;  ///< of the communicator, by rank of the group

  int rank_of(std::int32_t peer) const { return ranks[static_cast<std::size_t>(peer)]; }
};

struct Exchange {
  std::span<const message::Message> messages;
  std::vector<MPI_Request> requests;  ///< receives, then sends, both in the order of the messages
  std::size_t n_receives = 0;
  bool is_prepared = false;  ///< the receives are persistent
};

/// Makes persistent receives for messages that will be exchanged often.
int prepare(Exchange& exchange, const Route& route, std::span<const message::Message> messages);
void free_prepared(Exchange& exchange);

int begin(Exchange& exchange, const Route& route, std::span<const message::Message> messages);
int begin_prepared(Exchange& exchange, const Route& route);
int test(Exchange& exchange, std::size_t n_tests, std::int32_t* all_done);
/// See LockstepMpi.
int awaited(Exchange& exchange, std::int32_t* ranks, std::size_t* n_ranks);
/// Returns false if MPI could still write messages into memory that is reused.
bool finish(Exchange& exchange);

}  // namespace lockstep::mpi_module
