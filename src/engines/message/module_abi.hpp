#pragma once

#include <cstddef>
#include <cstdint>

#include "engines/message/message.hpp"

/// The C interface between the core and a module that moves the messages of a group over a library:
/// what the modules of MPI (engines/mpi/mpi_abi.hpp) and of UCX (engines/ucx/ucx_abi.hpp) have in
/// common. A module is compiled against one library, uses nothing else of lockstep, and throws
/// nothing.
extern "C" {

/// Functions that return int return 0 or an error code: positive ones are the library's. A group is
/// some ranks, which are numbered from 0 in it.
struct LockstepTransport {
  const char* (*library)();
  void (*error_text)(int code, char* text, std::size_t n_bytes);
  void (*release)(void* group);
  /// Starts all messages at once; one exchange at a time per group. `exchange` is set even
  /// if an error is returned, for finish(), which only an incomplete exchange needs; the messages
  /// must stay in place until then.
  int (*begin)(void* group, const lockstep::message::Message* messages, std::size_t n_messages,
               void** exchange);
  /// A hint: these messages will be passed to begin() often, with the same pointer. Their receives
  /// do not change. Null if the library gains nothing by it.
  int (*prepare)(void* group, const lockstep::message::Message* messages, std::size_t n_messages);
  /// Makes progress, with up to n_tests tests while messages are incomplete.
  int (*test)(void* exchange, std::size_t n_tests, std::int32_t* all_done);
  /// The ranks that have not sent or received all: at most one entry per message.
  int (*awaited)(void* exchange, std::int32_t* ranks, std::size_t* n_ranks);
  /// Ends an exchange. Cancels pending receives and waits, for about a second at most, for the
  /// buffers that the library still reads or writes.
  void (*finish)(void* exchange);
  /// Sends a control message of n_bytes to a rank, which receives it with poll_control(), in any
  /// order.
  int (*send_control)(void* group, int rank, const void* message, std::size_t n_bytes);
  int (*poll_control)(void* group, void* message, std::size_t n_bytes, std::int32_t* has_arrived);
};

}  // extern "C"
