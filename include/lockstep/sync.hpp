#pragma once

#include <chrono>
#include <functional>
#include <source_location>

#include <lockstep/group.hpp>

namespace lockstep {

struct RunRanksOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  ///< of one operation
};

/// Runs body(rank) as n ranks on n new threads of this process, each with its default group, and
/// joins them. Rethrows the first rank's exception that was no echo of another's (PeerFailed,
/// PeerLost). Throws UsageError where n < 1, SystemError where memory or threads lack.
void run_ranks(int n, const std::function<void(int rank)>& body,
               const RunRanksOptions& options = {},
               std::source_location where = std::source_location::current());

/// The same for a body without argument.
template <std::invocable F>
void run_ranks(int n, F body, const RunRanksOptions& options = {},
               std::source_location where = std::source_location::current()) {
  run_ranks(n, std::function<void(int)>([&body](int) { body(); }), options, where);
}

}  // namespace lockstep
