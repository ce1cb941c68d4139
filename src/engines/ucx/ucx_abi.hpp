#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "engines/message/module_abi.hpp"

/// The module of UCX.
extern "C" {

/// The address of a worker: where its messages are sent. With what else a split tells, short enough
/// for a message that goes through levels.
struct LockstepUcxAddress {
  std::uint32_t n_bytes;
  std::array<char, 476> bytes;
};

/// A worker receives the messages of one group, or all control messages of a world, and connects to
/// those of the other ranks, each when it is first used.
struct LockstepUcx {
  std::uint32_t version;  ///< kLockstepUcxVersion
  LockstepTransport transport;
  /// Before all others. Of several calls the first one that succeeds counts. transports: as
  /// UCX_TLS.
  int (*start)(const char* transports);
  int (*open)(void** worker);
  /// Of a worker that is in no group.
  void (*close)(void* worker);
  int (*address)(void* worker, LockstepUcxAddress* address);
  /// world: of all ranks; owns both workers on success. part: of `ranks` of a group; owns its
  /// worker on success. The addresses are by rank of the new group.
  /// Messages with another key are not received, but for control messages.
  int (*world)(void* data, void* control, const LockstepUcxAddress* data_addresses,
               const LockstepUcxAddress* control_addresses, std::size_t n_ranks, std::int32_t rank,
               std::uint32_t key, std::int32_t number, void** group);
  int (*part)(void* group, void* data, const LockstepUcxAddress* addresses,
              const std::int32_t* ranks, std::size_t n_ranks, std::int32_t rank,
              std::int32_t number, void** part);
  /// The rank of the group with which the last call failed; -1: with none.
  std::int32_t (*failed_peer)(void* group);
};

}  // extern "C"

inline constexpr std::uint32_t kLockstepUcxVersion = 2;
/// The module's one symbol: const LockstepUcx* lockstep_ucx().
inline constexpr const char* kLockstepUcxSymbol = "lockstep_ucx";
