#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <lockstep/engine.hpp>
#include <lockstep/error.hpp>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::internal {

/// The ranks that a failure is about, or the first of them. Plain data: engines send it.
struct PeerList {
  std::int32_t n;
  std::array<std::int32_t, 16> ranks;

  static PeerList of(std::span<const int> peers) {
    PeerList list{};
    const std::size_t n = std::min(peers.size(), list.ranks.size());
    std::copy_n(peers.begin(), n, list.ranks.begin());
    list.n = static_cast<std::int32_t>(n);
    return list;
  }
  /// n may be damaged: it came from another process.
  std::span<const std::int32_t> get() const {
    return std::span(ranks).first(std::min(static_cast<std::size_t>(std::max(n, 0)), ranks.size()));
  }
};

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
  PeerList peers{};  ///< see ErrorContext::peers; with a culprit: only that one
};

/// The failure that throw_failure throws as an error of the same type and text.
Failure failure_of(const Error& error);

/// The failure of the other ranks if `rank` throws `error`: the same if it is about peers, because
/// its text names them; else `rank` failed.
Failure failure_for_peers(const Error& error, int rank);

/// The numbers in the group of these ranks of the call's engine.
std::vector<int> numbers_of(const Call& call, std::span<const int> ranks);

/// "rank 0 waited 5 s for ranks 1, 2 of 4": these ranks of the call's engine, of n_ranks.
std::string text_of_wait(const Call& call, int rank, std::span<const int> awaited, int n_ranks);

/// "refused all_reduce #2: data is null, at train.cpp:8": of a call that a rank refuses.
std::string text_of_refusal(std::string_view call, std::string_view reason,
                            const std::source_location& where);

/// MismatchError, TimeoutError, PeerLost, PeerFailed: all ranks throw the same.
bool is_about_peers(Failure::Kind kind);

/// The text of the error, which names the culprit if there is one.
std::string text_of(const Failure& failure);

[[noreturn]] void throw_failure(const Failure& failure, ErrorContext context);

}  // namespace lockstep::internal
