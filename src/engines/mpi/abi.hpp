#pragma once

#include <cstddef>
#include <cstdint>

/// What the core and a loaded module say to each other, in C. A module is compiled against one MPI
/// (their handles and constants differ); it knows nothing else of lockstep, and throws nothing.
extern "C" {

struct LockstepMpiMessage {
  std::int32_t is_send;
  std::int32_t peer;
  void* data;
  std::size_t n_bytes;
};

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
  /// an error is returned, for finish().
  int (*begin)(void* communicator, const LockstepMpiMessage* messages, std::size_t n_messages,
               void** exchange);
  /// Makes progress and says which messages are done (is_done has n_messages entries).
  int (*test)(void* exchange, std::int32_t* all_done);
  int (*is_done)(void* exchange, std::size_t message, std::int32_t* is_done);
  /// Ends it; receives under way are cancelled.
  void (*finish)(void* exchange);
  /// A note of n_bytes to a rank, which hear() takes there, in whatever order.
  int (*tell)(void* communicator, int rank, const void* note, std::size_t n_bytes);
  int (*hear)(void* communicator, void* note, std::size_t n_bytes, std::int32_t* has_come);
};

}  // extern "C"

inline constexpr std::uint32_t kLockstepMpiVersion = 3;
/// The module's one symbol: const LockstepMpi* lockstep_mpi().
inline constexpr const char* kLockstepMpiSymbol = "lockstep_mpi";
