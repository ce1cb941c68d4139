#pragma once

#include <cstddef>
#include <cstdint>

#include "engines/message/module_abi.hpp"

/// The module of one MPI: their handles and constants differ.
extern "C" {

struct LockstepMpi {
  std::uint32_t version;  ///< kLockstepMpiVersion
  /// If finish() ends a message that MPI would still write, all later calls of the module fail, and
  /// call no function of MPI.
  LockstepTransport transport;
  /// Initializes MPI unless the program has done so. MPI initialized here is finalized when the
  /// program ends.
  int (*start)(int* rank, int* n_ranks);
  /// After start(): the level that MPI grants, as "MPI_THREAD_FUNNELED", if only the thread that
  /// initialized it may call it; is_this: whether that is the calling one. Else null.
  const char* (*one_thread)(std::int32_t* is_this);
  /// The number of ranks on this host, and the cores that any of them may use: adds the other
  /// ranks' bits to mask. Collective.
  int (*host_ranks)(std::uint64_t* mask, std::size_t n_words, int* n_ranks);
  /// Skips MPI_Finalize, which after a failure would wait for ranks that never call it.
  void (*skip_finalize)();
  /// A new communicator over the world with the group of all its ranks (collective), and groups of
  /// `ranks` of a group over the same communicator, whose messages have tags from their number.
  /// Ranks are those of the group that is named.
  int (*world)(std::int32_t number, void** group, std::int32_t* last_number);
  int (*part)(void* group, const std::int32_t* ranks, std::size_t n_ranks, std::int32_t number,
              void** part);
};

}  // extern "C"

inline constexpr std::uint32_t kLockstepMpiVersion = 8;
/// The module's one symbol: const LockstepMpi* lockstep_mpi().
inline constexpr const char* kLockstepMpiSymbol = "lockstep_mpi";
