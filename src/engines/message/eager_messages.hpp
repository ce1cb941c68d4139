#pragma once

#include <cstddef>
#include <lockstep/engine.hpp>
#include <memory>
#include <span>
#include <vector>

#include "engines/message/header.hpp"
#include "engines/message/message_channel.hpp"
#include "engines/message/subset.hpp"

namespace lockstep::message {

/// The first message of a call between each pair of ranks of a subset: a header, followed by eager
/// data. A message is as long as its data, and every receive has the maximum length, so that ranks
/// that make different calls can parse each other's messages. If the transport does not allow a
/// message shorter than its receive, all messages have the maximum length, that of an EagerMessage.
class EagerMessages {
 public:
  /// Between hosts a copy at each end costs less than another exchange up to some 16 KiB. On one
  /// host an MPI uses rendezvous if the message exceeds 4,096 bytes with its own headers.
  static constexpr std::size_t kMaxPayload = 16 << 10, kMaxPayloadOfHost = 60 * 64;

  EagerMessages(MessageChannel& channel, const Subset& subset);
  // messages_ points to members.
  EagerMessages(const EagerMessages&) = delete;
  EagerMessages& operator=(const EagerMessages&) = delete;

  /// The most bytes that a rank can send eagerly to another.
  std::size_t payload_bytes() const noexcept { return payload_bytes_; }

  /// The next exchange sends this header to all ranks, followed by `payload` to all or to one, or
  /// by the r-th of equal parts to each rank r. payload() of this rank is then its own data.
  void send_to_all(const Header& mine, std::span<const std::byte> payload);
  void send_to(int to, const Header& mine, std::span<const std::byte> payload);
  void send_parts(const Header& mine, const std::byte* parts, std::size_t part_bytes);
  void exchange(const Call& call, Limit& limit) { channel_.exchange(messages_, call, limit); }

  /// For a send or recv: the same with `peer` only. False: see MessageChannel::exchange_with;
  /// `elsewhere` is then the header of the peer.
  bool exchange_with(int peer, const Header& mine, std::span<const std::byte> payload,
                     Header& elsewhere, const Call& call, Limit& limit);

  /// After an exchange: what rank r sent, which may be this rank. Valid until the next exchange.
  const Header& header(int r) const noexcept { return *reinterpret_cast<const Header*>(at(r)); }
  const std::byte* payload(int r) const noexcept { return at(r) + sizeof(Header); }

 private:
  std::byte* at(int r) const noexcept { return data_ + static_cast<std::size_t>(r) * stride_; }
  std::byte* own() const noexcept { return at(subset_.rank); }
  void set_own(const Header& mine, std::span<const std::byte> payload);
  std::size_t length(std::size_t payload_bytes) const noexcept {
    return takes_shorter_ ? sizeof(Header) + payload_bytes : stride_;
  }

  MessageChannel& channel_;
  const Subset subset_;
  const bool takes_shorter_ = channel_.takes_shorter_messages();
  const std::size_t payload_bytes_ = !takes_shorter_             ? sizeof(EagerMessage::payload)
                                     : channel_.is_on_one_host() ? kMaxPayloadOfHost
                                                                 : kMaxPayload;
  const std::size_t stride_ = sizeof(Header) + payload_bytes_;
  // By rank: received messages, and this rank's own. Then, if parts are sent, those to send, by
  // rank.
  std::unique_ptr<std::byte[]> memory_;
  std::byte* data_;
  std::vector<Message> messages_;  // for each other rank, in order, one to it and one from it
};

}  // namespace lockstep::message
