#pragma once

#include <cstddef>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/engine.hpp>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engines/message/header.hpp"
#include "engines/message/message_control.hpp"
#include "engines/message/transport.hpp"

namespace lockstep::message {

using Limit = detail::TimeLimit;

/// The ranks of one Group over a transport: exchanges of messages, and the failures that end them.
///
/// The first rank that detects a failure sends it to all others in a control message, and each
/// throws it from its current or next exchange; the channel is then dead. A rank that leaves the
/// world announces that on the world's channel. This fails only calls that wait for it: its last
/// messages may still be in transit.
///
/// Threads: one at a time per channel; abandon, end_with: any.
class MessageChannel {
 public:
  /// The world's: all ranks of `transport`.
  explicit MessageChannel(std::unique_ptr<Transport> transport);

  int rank() const noexcept { return transport_.rank(); }
  int size() const noexcept { return transport_.size(); }
  std::size_t piece_bytes() const noexcept { return transport_.piece_bytes(); }
  bool takes_shorter_messages() const noexcept { return transport_.takes_shorter_messages(); }
  void prepare(std::span<const Message> messages) { transport_.prepare(messages); }
  std::string_view why_one_thread() const noexcept { return transport_.why_one_thread(); }

  /// Returns when all messages, none of them empty, have been sent and received. Notifies
  /// call.progress before it waits. Throws TimeoutError at the limit, PeerLost, PeerFailed,
  /// MismatchError, EngineError; the other ranks are then notified.
  void exchange(std::span<const Message> messages, const Call& call, Limit& limit);

  /// Whether there are too many ranks to send short messages between every pair: parts of
  /// Transport::kMaxDirect ranks do so, then the first ranks of these parts, and so on.
  bool has_levels() const noexcept { return has_levels_; }
  bool is_on_one_host() const noexcept { return transport_.is_on_one_host(); }
  /// Exchanges messages with `peer` alone. Returns false if it can never complete because the peer
  /// waits for this rank in another call, whose header is then in `header`.
  bool exchange_with(int peer, std::span<const Message> messages, Header& header, const Call& call,
                     Limit& limit);

  /// A channel number that is never returned again, on any rank.
  std::int64_t next_number() { return world_->next_number(); }
  /// What the others need to know of this rank to split(), which is the next call: address_bytes().
  /// Throws EngineError.
  std::vector<std::byte> open_part(const Call& call);
  std::size_t address_bytes() const noexcept { return transport_.address_bytes(); }
  /// The channel of some of the ranks, with the number that one of them drew. Sends no messages.
  /// addresses: what open_part() has returned on the members. Throws EngineError if the library has
  /// no such channel.
  std::unique_ptr<MessageChannel> split(const std::vector<int>& members, std::int64_t number,
                                        const Call& call,
                                        std::span<const std::byte> addresses = {});

  /// Before each call of the group: counts collectives.
  void begin(const Call& call);
  /// See Engine::refuse. Notifies the peers, which poll while they wait. A control message may
  /// overtake the messages of earlier calls, so it contains their number: a rank that has refused
  /// fewer calls and is in a later call can no longer match any call of this rank.
  void refuse(const Refusal& refusal) noexcept;
  /// The calls that some ranks have refused but not all of `rows`. Waits briefly for the control
  /// messages of the others.
  std::vector<RefusedCall> refused_calls(std::span<const Row> rows);
  /// Ends waits on this channel with PeerFailed, on every rank.
  void abandon(std::string_view reason) noexcept;
  /// See Engine::end_with.
  void end_with(const Error& error) noexcept;
  /// Throws the failure, of which the ranks are this channel's, on every rank.
  [[noreturn]] void fail(internal::Failure failure, const Call& call);
  /// Notifies every rank of the world that this rank leaves. On the world's channel.
  void leave(std::string_view failure) noexcept;

 private:
  MessageChannel(std::unique_ptr<Transport> transport, std::vector<int> members,
                 std::shared_ptr<Control> world);
  struct StatusQuery;
  /// False: impossible, see exchange_with.
  bool perform(std::span<const Message> messages, const Call& call, Limit& limit,
               StatusQuery* query);

  // message_channel_wait.cpp
  bool wait(const Call& call, Limit& limit, StatusQuery* query);
  bool is_impossible(StatusQuery& query);
  /// The ranks that prevent an exchange from completing in which this rank waits for `awaited`:
  /// these, or those for which they wait, and so on, without those that are waiting themselves. And
  /// ranks for which others wait in this call.
  std::vector<int> find_late(const std::map<int, WaitState>& wait_states,
                             std::vector<int> awaited) const;
  /// The states of this rank and of all ranks that reply in time.
  std::map<int, WaitState> query_wait_states(const Call& call);

  // message_channel_failure.cpp
  void poll_control();
  void throw_if_failed(const Call& call) const;
  /// Throws if a rank that this one waits for has refused the call, or an earlier one.
  void throw_if_refused(const Call& call);
  /// If one of these ranks has left the world: that failure.
  std::optional<internal::Failure> departure_among(std::span<const int> ranks) const;
  /// Ends waits on this channel, on every rank; only on this one if it has left the world.
  void notify(const internal::Failure& failure) noexcept;
  [[noreturn]] void fail_transport(const TransportError& error, const Call& call);
  /// detail: what follows in the text; late: the ranks that the error is about.
  [[noreturn]] void fail_late(const std::vector<int>& awaited, const Call& call,
                              std::string_view detail, const std::vector<int>& late);

  std::shared_ptr<Control> control_;
  std::shared_ptr<Control> world_;  // the same on the world's channel
  Transport& transport_;
  std::vector<int> members_;  // ranks of the world
  const bool has_levels_ =
      transport_.answers_status_queries() && transport_.size() > Transport::kMaxDirect;
  bool is_pair_ = false;             ///< of the current call, which may consist of steps
  std::uint64_t n_collectives_ = 0;  ///< begun
  HeaderMaker headers_;              ///< of calls that a peer refused
};

}  // namespace lockstep::message
