#pragma once

#include <cstdint>
#include <lockstep/error.hpp>
#include <string>

namespace lockstep::internal {

/// Why a call failed. The rank that detects a failure sends it to the others, and each throws it as
/// an error of its own.
struct Failure {
  /// One for each type of error; peer_left is a PeerLost too. Sent between processes that may link
  /// other versions: new kinds go to the end.
  enum class Kind : std::uint32_t {
    mismatch,
    timeout,
    peer_lost,
    peer_failed,
    engine,
    system,
    peer_left,
    usage,
  };
  static constexpr int kNoCulprit = -1;

  Kind kind = Kind::engine;
  /// peer_*: the rank that the error names in front of the text; kNoCulprit: the text is complete.
  int culprit = kNoCulprit;
  int error_number = 0;  ///< system: an errno value, whose text the error adds
  std::string text{};
};

/// The failure that throw_failure throws as an error of the same type and text.
Failure failure_of(const Error& error);

/// The failure of the other ranks if `rank` throws `error`: the same if it is about peers, because
/// its text names them; else `rank` failed.
Failure failure_for_peers(const Error& error, int rank);

/// MismatchError, TimeoutError, PeerLost, PeerFailed: all ranks throw the same.
bool is_about_peers(Failure::Kind kind);

/// The text of the error, which names the culprit if there is one.
std::string text_of(const Failure& failure);

[[noreturn]] void throw_failure(const Failure& failure, ErrorContext context);

}  // namespace lockstep::internal
