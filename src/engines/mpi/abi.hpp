#pragma once

#include <cstddef>
#include <cstdint>

#include "engines/message/message.hpp"

/// What the core and a loaded module say to each other, in C. A module is compiled against one MPI
/// (their handles and constants differ); it knows nothing else of lockstep, and throws nothing.
extern "C" {

/// Functions return 0 or an MPI error code.
struct LockstepMpi {
  std::uint32_t version;  ///< kLockstepMpiVersion
  const char* (*library)();
  void (*error_text)(int code, char* text, std::size_t n_bytes);
  /// Initialises MPI unless the program has. What it initialised it finalizes when the program
  /// ends.
  int (*start)(int* rank, int* n_ranks);
  /// How many ranks share this host, and the cores that any of them may use: mask gets the others'
  /// bits. Collective.
  int (*neighbours)(std::uint64_t* mask, std::size_t n_words, int* n_ranks);
  /// After a failure MPI_Finalize would wait for ranks that never come.
  void (*give_up_finalize)();
  /// A new communicator over the world, and one over the ranks of another that give the same color,
  /// in the order of their keys (collective over all of the other).
  int (*world)(void** communicator);
  int (*split)(void* communicator, int color, int key, void** part);
  void (*release)(void* communicator);
  /// All messages at once, one exchange at a time on a communicator. `exchange` is set even where
  /// an error is returned, for finish(), which only an exchange that is not all done needs; the
  /// messages stay where they are until then.
  int (*begin)(void* communicator, const lockstep::message::Message* messages,
               std::size_t n_messages, void** exchange);
  /// The same messages will be given to begin() often, by the same pointer.
  int (*prepare)(void* communicator, const lockstep::message::Message* messages,
                 std::size_t n_messages);
  /// Makes progress, up to n_tests times as long as messages are not done.
  int (*test)(void* exchange, std::size_t n_tests, std::int32_t* all_done);
  /// Who has not sent or taken all: up to one entry for each message.
  int (*awaited)(void* exchange, std::int32_t* ranks, std::size_t* n_ranks);
  /// Ends it. Receives under way are cancelled, and what MPI still reads or writes is waited for,
  /// for about a second at most.
  void (*finish)(void* exchange);
  /// A note of n_bytes to a rank, which hear() takes there, in whatever order.
  int (*tell)(void* communicator, int rank, const void* note, std::size_t n_bytes);
  int (*hear)(void* communicator, void* note, std::size_t n_bytes, std::int32_t* has_come);
};

}  // extern "C"

inline constexpr std::uint32_t kLockstepMpiVersion = 4;
/// The module's one symbol: const LockstepMpi* lockstep_mpi().
inline constexpr const char* kLockstepMpiSymbol = "lockstep_mpi";
