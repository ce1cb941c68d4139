#pragma once

#include <chrono>
#include <cstddef>
#include <limits>
#include <lockstep/engine.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engines/message/message.hpp"

namespace lockstep::message {

/// When the waits of a call end: its timeout after the first time that somebody asks, so that a
/// call that hardly waits does not read the clock.
class Limit {
 public:
  explicit Limit(const Call& call) : timeout_(call.timeout) {}
  std::chrono::steady_clock::time_point end() {
    if (!end_) end_ = std::chrono::steady_clock::now() + timeout_;
    return *end_;
  }

 private:
  std::chrono::milliseconds timeout_;
  std::optional<std::chrono::steady_clock::time_point> end_;
};

/// The ranks of one Group on a library that passes messages: all that such a library must bring.
/// Messages between two ranks arrive in order, and never on another channel. Pairs, and not the
/// library's own collectives, so that it is known who is late, lost or failed.
///
/// Threads: one at a time per channel; abandon from any.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// Sends and receives all at once, none of them without bytes; returns when all is done. Tells
  /// call.track before it waits. Throws TimeoutError at the limit, PeerLost, PeerFailed,
  /// MismatchError, EngineError; the channel is dead then, and its other ranks are told.
  virtual void exchange(std::span<const Message> messages, const Call& call, Limit& limit) = 0;
  /// Of how much an exchange is best made, where it is not latency that counts.
  virtual std::size_t piece_bytes() const noexcept {
    return std::numeric_limits<std::size_t>::max();
  }
  /// This very span will be exchanged often, and stays as it is: what can be prepared, may be.
  virtual void prepare(std::span<const Message> /*messages*/) {}
  /// A channel over `members`, ranks of this one, this among them. For all ranks of this channel,
  /// after each has heard from each that it calls this; every rank is a member of one part.
  virtual std::unique_ptr<Channel> split(const std::vector<int>& members, const Call& call,
                                         Limit& limit) = 0;
  /// Waits on this channel end with PeerFailed, on every rank.
  virtual void abandon(std::string_view reason) noexcept = 0;
  /// Waits on this channel end with this error, on every rank: of its type and with its text, where
  /// that names who is to blame; else PeerFailed.
  virtual void end_with(const Error& error) noexcept = 0;
  /// Throws MismatchError with this text, on every rank.
  [[noreturn]] virtual void fail_mismatch(const std::string& table, const Call& call) = 0;
  /// Tells every rank of the world that this one leaves.
  virtual void leave(std::string_view failure) noexcept = 0;
};

}  // namespace lockstep::message
