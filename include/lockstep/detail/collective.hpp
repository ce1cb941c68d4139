#pragma once

#include <cstdint>
#include <exception>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>

#include <lockstep/engine.hpp>

namespace lockstep {
class Group;
}

namespace lockstep::detail {

/// Guards an operation of a layer above the Group, whose code may throw before, between and after
/// its messages. Every public function that communicates uses one, unless it sends a single message
/// and only the Group's own checks can fail before it.
///
/// If an exception leaves run() before this rank's first call on the group, the operation counts as
/// a refused call, and the peers are notified (Engine::refuse). Between two calls, the exception
/// ends the group with PeerFailed and its text, unless it is an Error that all ranks throw. So code
/// that may throw after the last message belongs after run(). A call that succeeds pays two loads.
/// Threads: as a call on the Group.
class Collective {
 public:
  /// `group` must live as long. A refused send or recv, by `op`, ends the group.
  Collective(std::string_view operation, const Group& group, std::source_location where,
             Op op = Op::barrier) noexcept;

  /// Counts the operation as refused, for this reason. Call it before the first call on the group.
  void refuse(std::string_view reason) const noexcept;
  /// The text that peers get of an exception: of an Error only text(), because its operation and
  /// source line are sent separately.
  static std::string reason_of(const std::exception_ptr& error);
  /// Whether this rank has called, or refused a call, on the group since.
  bool has_begun() const noexcept;
  /// What run() does after an exception, for an operation that does not use run().
  /// is_collective_error: all ranks throw it, as they do an Error other than UsageError.
  void failed(std::string_view reason, bool is_collective_error) const noexcept;

  template <class F>
  decltype(auto) run(F&& f) const {
    try {
      return std::forward<F>(f)();
    } catch (...) {
      failed();
      throw;
    }
  }

 private:
  void failed() const noexcept;  // in a handler

  std::string_view operation_;
  const Group& group_;
  std::source_location where_;
  Op op_;
  std::uint64_t n_made_, n_refused_;
};

}  // namespace lockstep::detail
