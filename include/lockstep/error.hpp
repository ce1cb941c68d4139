#pragma once

#include <cstdint>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep {

/// Which call failed. Every lockstep error carries one.
struct ErrorContext {
  std::string operation{};       ///< "all_reduce", "init_dist", ...
  std::string group{};           ///< "world", "world/0", ...; empty outside a group
  int rank = -1;                 ///< this rank in that group; -1 outside a group
  std::uint64_t sequence = 0;    ///< number of the call in that group, from 1; 0: several calls
  std::source_location where{};  ///< the caller's line
  /// Ranks of the group that the error is about: who died, failed, was late, or made another call
  /// than most; at most 16 of them. Empty: this rank itself, or not known.
  std::vector<int> peers{};
};

/// Base of all errors. what() names the operation, the rank, the call and the source line, then the
/// cause and the remedy.
class Error : public std::runtime_error {
 public:
  Error(ErrorContext context, const std::string& text);
  const ErrorContext& context() const noexcept { return context_; }
  /// what() without the context in front.
  const std::string& text() const noexcept { return text_; }

 private:
  ErrorContext context_;
  std::string text_;
};

/// A bug in the caller, detected before any data is transferred. The group stays usable.
class UsageError : public Error {
  using Error::Error;
};

/// Ranks disagree on the operation, type, count, root or reduction. The group is dead.
class MismatchError : public Error {
  using Error::Error;
};

/// A peer did not arrive within the timeout. The group is dead.
class TimeoutError : public Error {
  using Error::Error;
};

/// A peer died or left. The group is dead.
class PeerLost : public Error {
  using Error::Error;
};

/// A peer left because of an exception, and this carries its text. The group is dead.
class PeerFailed : public Error {
  using Error::Error;
};

/// A system call failed. The group is dead.
class SystemError : public Error {
 public:
  SystemError(ErrorContext context, int error_number, const std::string& text);
  int error_number() const noexcept { return error_number_; }  ///< an errno value

 private:
  int error_number_;
};

/// An engine's own library (MPI, c10d) failed, or an engine is not available. The group is dead.
class EngineError : public Error {
  using Error::Error;
};

}  // namespace lockstep
