#pragma once

#include <cstdint>
#include <exception>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>

#include <lockstep/engine.hpp>
#include <lockstep/group.hpp>

namespace lockstep::detail {

/// An operation of a layer above the Group, whose code may throw before, between and after its
/// messages. Every public function that communicates runs in one, unless the Group's own checks are
/// all that can fail before its only message.
///
/// If an exception leaves run() before this rank's first call on the group, the operation is a
/// refused call: it counts, and the peers are told (Engine::refuse). Between two calls, it ends the
/// group with PeerFailed and its text, except an Error that the ranks throw together. So what
/// throws after the last message belongs behind run(). Costs an accepted call two loads.
/// Threads: as a call on the Group.
class Collective {
 public:
  /// `group` must live as long.
  Collective(std::string_view operation, const Group& group, std::source_location where) noexcept
      : Collective(operation, group, where, Op::barrier, /*peer=*/-1) {}
  /// A send to, or recv from, `peer`.
  Collective(Op pair, int peer, const Group& group, std::source_location where) noexcept
      : Collective(name_of(pair), group, where, pair, peer) {}

  /// Counts the operation as refused, for this reason. Before its first call on the group.
  void refuse(std::string_view reason) const noexcept;
  /// Of a send or recv: how many of them with this peer this rank has refused; see Call::n_refused.
  std::uint32_t n_refused_of_pair() const noexcept;
  /// What peers are told of an exception: an Error's own text, because its operation and place
  /// stand beside it.
  static std::string reason_of(const std::exception_ptr& error);
  /// Whether this rank has called, or refused a call, on the group since.
  bool has_begun() const noexcept;
  /// What run() does when an exception has left it, for an operation that is not in it.
  /// is_thrown_together: by all ranks, as an Error that is no UsageError.
  void failed(std::string_view reason, bool is_thrown_together) const noexcept;

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
  Collective(std::string_view operation, const Group& group, std::source_location where, Op op,
             int peer) noexcept;
  void failed() const noexcept;  // in a handler

  std::string_view operation_;
  const Group& group_;
  std::source_location where_;
  Op op_;
  int peer_;
  std::uint64_t n_made_, n_refused_;
};

}  // namespace lockstep::detail
