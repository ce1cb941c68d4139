#pragma once

#include <cstddef>
#include <cstdint>

#include "engines/message/message.hpp"

/// The C interface between the core and a loaded module. A module is compiled against one MPI
/// (their handles and constants differ); it uses nothing else of lockstep, and throws nothing.
extern "C" {

/// Functions that return int return 0 or an MPI error code.
struct LockstepMpi {
  std::uint32_t version;  ///< kLockstepMpiVersion
  const char* (*library)();
  void (*error_text)(int code, char* text, std::size_t n_bytes);
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
  void (*release)(void* group);
  /// Starts all messages at once; one exchange at a time per group. `exchange` is set even
  /// if an error is returned, for finish(), which only an incomplete exchange needs; the messages
  /// must stay in place until then.
  int (*begin)(void* group, const lockstep::message::Message* messages, std::size_t n_messages,
               void** exchange);
  /// A hint: these messages will be passed to begin() often, with the same pointer. Their receives
  /// do not change.
  int (*prepare)(void* group, const lockstep::message::Message* messages, std::size_t n_messages);
  /// Makes progress, with up to n_tests tests while messages are incomplete.
  int (*test)(void* exchange, std::size_t n_tests, std::int32_t* all_done);
  /// The ranks that have not sent or received all: at most one entry per message.
  int (*awaited)(void* exchange, std::int32_t* ranks, std::size_t* n_ranks);
  /// Ends an exchange. Cancels pending receives and waits, for about a second at most, for the
  /// buffers that MPI still reads or writes. If it would still write one, all later calls of the
  /// module fail, and call no function of MPI.
  void (*finish)(void* exchange);
  /// Sends a control message of n_bytes to a rank, which receives it with poll_control(), in any
  /// order.
  int (*send_control)(void* group, int rank, const void* message, std::size_t n_bytes);
  int (*poll_control)(void* group, void* message, std::size_t n_bytes, std::int32_t* has_arrived);
};

}  // extern "C"

inline constexpr std::uint32_t kLockstepMpiVersion = 7;
/// The module's one symbol: const LockstepMpi* lockstep_mpi().
inline constexpr const char* kLockstepMpiSymbol = "lockstep_mpi";
