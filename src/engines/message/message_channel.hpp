#pragma once

#include <cstddef>
#include <lockstep/engine.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/time_limit.hpp"
#include "engines/message/transport.hpp"

namespace lockstep::message {

using Limit = base::TimeLimit;

/// The ranks of one Group over a transport: exchanges of messages, and what ends them.
///
/// The first rank that detects a failure sends it to all others in a control message, and each
/// throws it from its current or next exchange; the channel is then dead. A rank that leaves the
/// world announces that on the world's channel. This fails only calls that wait for it: its last
/// messages may still be in transit.
///
/// Threads: one at a time per channel; abandon, end_with: any.
class Channel {
 public:
  /// The world's: all ranks of `transport`.
  explicit Channel(std::unique_ptr<Transport> transport);

  int rank() const noexcept { return transport_.rank(); }
  int size() const noexcept { return transport_.size(); }
  std::size_t piece_bytes() const noexcept { return transport_.piece_bytes(); }
  void prepare(std::span<const Message> messages) { transport_.prepare(messages); }

  /// Returns when all messages, none of them empty, have been sent and received. Notifies
  /// call.progress before it waits. Throws TimeoutError at the limit, PeerLost, PeerFailed,
  /// MismatchError, EngineError; the other ranks are then notified.
  void exchange(std::span<const Message> messages, const Call& call, Limit& limit);
  /// See Transport::split.
  std::unique_ptr<Channel> split(const std::vector<int>& members, const Call& call, Limit& limit);

  /// Ends waits on this channel with PeerFailed, on every rank.
  void abandon(std::string_view reason) noexcept;
  /// See Engine::end_with.
  void end_with(const Error& error) noexcept;
  /// Throws the failure on every rank.
  [[noreturn]] void fail(const internal::Failure& failure, const Call& call);
  /// Notifies every rank of the world that this rank leaves. On the world's channel.
  void leave(std::string_view failure) noexcept;

 private:
  struct Control;

  Channel(std::unique_ptr<Transport> transport, std::vector<int> members,
          std::shared_ptr<Control> world);
  void wait(const Call& call, Limit& limit);
  void poll_control();
  void throw_if_failed(const Call& call) const;
  /// If one of these ranks has left the world: that failure.
  std::optional<internal::Failure> departure_among(std::span<const int> ranks) const;
  void notify(const internal::Failure& failure) noexcept;
  [[noreturn]] void fail_transport(const TransportError& error, const Call& call);
  [[noreturn]] void fail_late(const std::vector<int>& late, const Call& call);

  std::shared_ptr<Control> control_;
  std::shared_ptr<Control> world_;  // the same on the world's channel
  Transport& transport_;
  std::vector<int> members_;  // ranks of the world
};

}  // namespace lockstep::message
