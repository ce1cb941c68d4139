#pragma once

#include <cstddef>
#include <limits>
#include <lockstep/engine.hpp>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/time_limit.hpp"
#include "engines/message/message.hpp"

namespace lockstep::message {

using Limit = base::TimeLimit;

/// The ranks of one Group over a message-passing library: all that such a library must provide.
/// Messages between two ranks arrive in order, and never on another channel. Point-to-point rather
/// than the library's own collectives, to identify the rank that is late, lost or failed.
///
/// Threads: one at a time per channel; abandon: any.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// Sends and receives all messages at once, none of them empty; returns when all are complete.
  /// Notifies call.progress before it waits. Throws TimeoutError at the limit, PeerLost,
  /// PeerFailed, MismatchError, EngineError; the channel is then dead, and its other ranks are
  /// notified.
  virtual void exchange(std::span<const Message> messages, const Call& call, Limit& limit) = 0;
  /// The best size of an exchange when bandwidth matters, not latency.
  virtual std::size_t piece_bytes() const noexcept {
    return std::numeric_limits<std::size_t>::max();
  }
  /// A hint: this exact span will be exchanged often and does not change.
  virtual void prepare(std::span<const Message> /*messages*/) {}
  /// A channel over `members`, ranks of this channel that include this rank. All ranks of this
  /// channel call it, after each has received each peer's header; each belongs to one part.
  virtual std::unique_ptr<Channel> split(const std::vector<int>& members, const Call& call,
                                         Limit& limit) = 0;
  /// Ends waits on this channel with PeerFailed, on every rank.
  virtual void abandon(std::string_view reason) noexcept = 0;
  /// Ends waits on this channel with this error on every rank: with its type and text if the text
  /// names the failed rank; else PeerFailed.
  virtual void end_with(const Error& error) noexcept = 0;
  /// Throws MismatchError with this text, on every rank.
  [[noreturn]] virtual void fail_mismatch(const std::string& table, const Call& call) = 0;
  /// Notifies every rank of the world that this rank leaves.
  virtual void leave(std::string_view failure) noexcept = 0;
};

}  // namespace lockstep::message
