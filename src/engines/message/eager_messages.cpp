#include "engines/message/eager_messages.hpp"

#include <array>
#include <cstdint>
#include <cstring>

#include "base/bytes.hpp"

namespace lockstep::message {
namespace {

using base::copy_bytes;
using Direction = Message::Direction;

constexpr std::size_t kAlignment = alignof(EagerMessage);  // for kernels, and of a header's fields

}  // namespace

EagerMessages::EagerMessages(MessageChannel& channel, const Subset& subset)
    : channel_(channel), subset_(subset) {
  static_assert(sizeof(Header) % kAlignment == 0 && kMaxPayload % kAlignment == 0 &&
                kMaxPayloadOfHost % kAlignment == 0);
  const auto n = static_cast<std::size_t>(subset_.size);
  // Not initialised, so that only pages that calls use get memory.
  memory_ = std::make_unique_for_overwrite<std::byte[]>(2 * n * stride_ + kAlignment);
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
  data_ = memory_.get() + (kAlignment - address % kAlignment);
  // The padding behind shorter data.
  if (!takes_shorter_) std::memset(data_, 0, 2 * n * stride_);
  for (int r = 0; r < subset_.size; ++r) {
    if (r == subset_.rank) continue;
    messages_.push_back({Direction::send, subset_.number_of(r), own(), stride_});
    messages_.push_back({Direction::receive, subset_.number_of(r), at(r), stride_});
    std::memset(at(r), 0, sizeof(Header));  // without comparison a peer may send less than that
  }
  if (!channel_.has_levels()) channel_.prepare(messages_);
}

void EagerMessages::set_own(const Header& mine, std::span<const std::byte> payload) {
  std::memcpy(own(), &mine, sizeof(mine));
  copy_bytes(own() + sizeof(mine), payload.data(), payload.size());
}

void EagerMessages::send_to_all(const Header& mine, std::span<const std::byte> payload) {
  set_own(mine, payload);
  for (std::size_t i = 0; i < messages_.size(); i += 2) {
    messages_[i].data = own();
    messages_[i].n_bytes = length(payload.size());
  }
}

void EagerMessages::send_to(int to, const Header& mine, std::span<const std::byte> payload) {
  set_own(mine, payload);
  for (std::size_t i = 0; i < messages_.size(); i += 2) {
    messages_[i].data = own();
    messages_[i].n_bytes = length(messages_[i].peer == subset_.number_of(to) ? payload.size() : 0);
  }
}

void EagerMessages::send_parts(const Header& mine, const std::byte* parts, std::size_t part_bytes) {
  const auto part = [&](int r) {
    return std::span(parts + static_cast<std::size_t>(r) * part_bytes, part_bytes);
  };
  set_own(mine, part(subset_.rank));
  for (std::size_t i = 0; i < messages_.size(); i += 2) {
    Message& message = messages_[i];
    const int peer = subset_.rank_of(message.peer);
    std::byte* const to = at(subset_.size + peer);
    std::memcpy(to, &mine, sizeof(mine));
    copy_bytes(to + sizeof(mine), part(peer).data(), part_bytes);
    message.data = to;
    message.n_bytes = length(part_bytes);
  }
}

bool EagerMessages::exchange_with(int peer, const Header& mine, std::span<const std::byte> payload,
                                  Header& elsewhere, const Call& call, Limit& limit) {
  set_own(mine, payload);
  const std::array<Message, 2> messages = {
      Message{Direction::send, subset_.number_of(peer), own(), length(payload.size())},
      Message{Direction::receive, subset_.number_of(peer), at(peer), stride_}};
  return channel_.exchange_with(subset_.number_of(peer), messages, elsewhere, call, limit);
}

}  // namespace lockstep::message
