#pragma once

#include <cstddef>
#include <lockstep/engine.hpp>
#include <memory>
#include <span>
#include <vector>

#include "engines/message/header.hpp"
#include "engines/message/message_channel.hpp"

namespace lockstep::message {

/// The first message of a call from each rank to each: a header, and eager data behind it. A
/// message is as long as its data, and its receive as long as any may be: so ranks that make
/// different calls can parse each other's. Over a transport that takes no message shorter than its
/// receive, all have the longest length.
class EagerMessages {
 public:
  /// Between hosts a copy at each end costs less than another exchange up to some 16 KiB. On one
  /// host an MPI asks the receiver first if the message exceeds 4,096 bytes with its own headers.
  static constexpr std::size_t kMostPayload = 16 << 10, kMostPayloadOfHost = 60 * 64;

  explicit EagerMessages(Channel& channel);
  // The messages have addresses of members.
  EagerMessages(const EagerMessages&) = delete;
  EagerMessages& operator=(const EagerMessages&) = delete;

  /// The most bytes that a rank can send eagerly to another.
  std::size_t payload_bytes() const noexcept { return payload_bytes_; }

  /// The next exchange sends this header to all ranks, and behind it `payload` to all or to one, or
  /// to each rank r the r-th of equal parts. This rank's own is its payload() then.
  void send_to_all(const Header& mine, std::span<const std::byte> payload);
  void send_to(int to, const Header& mine, std::span<const std::byte> payload);
  void send_parts(const Header& mine, const std::byte* parts, std::size_t part_bytes);
  void exchange(const Call& call, Limit& limit) { channel_.exchange(messages_, call, limit); }

  /// Of a send or recv: the same with `peer` alone, and sends `payload`. False: see
  /// Channel::exchange_with; `elsewhere` is the header of the peer.
  bool exchange_with(int peer, const Header& mine, std::span<const std::byte> payload,
                     Header& elsewhere, const Call& call, Limit& limit);

  /// After an exchange, what rank r sent; of this rank its own. Valid until the next one.
  const Header& header(int r) const noexcept { return *reinterpret_cast<const Header*>(at(r)); }
  const std::byte* payload(int r) const noexcept { return at(r) + sizeof(Header); }

 private:
  std::byte* at(int r) const noexcept { return data_ + static_cast<std::size_t>(r) * stride_; }
  std::byte* own() const noexcept { return at(channel_.rank()); }
  void set_own(const Header& mine, std::span<const std::byte> payload);
  std::size_t length(std::size_t payload_bytes) const noexcept {
    return is_shorter_taken_ ? sizeof(Header) + payload_bytes : stride_;
  }

  Channel& channel_;
  const bool is_shorter_taken_ = channel_.takes_shorter_messages() && !channel_.has_rounds();
  const std::size_t payload_bytes_ = !is_shorter_taken_          ? sizeof(EagerMessage::payload)
                                     : channel_.is_on_one_host() ? kMostPayloadOfHost
                                                                 : kMostPayload;
  const std::size_t stride_ = sizeof(Header) + payload_bytes_;
  // By rank: received, and this rank's own. Then by rank, if parts are sent: to be sent.
  std::unique_ptr<std::byte[]> memory_;
  std::byte* data_;
  std::vector<Message> messages_;  // for each other rank, in order, one to it and one from it
};

}  // namespace lockstep::message
