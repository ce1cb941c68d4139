#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "engines/shared/protocol/channel.hpp"

namespace lockstep::shared {

std::byte* Channel::outbox(int rank, std::uint64_t chunk) const noexcept {
  const std::size_t number = static_cast<std::size_t>(rank) * kOutboxDepth +
                             static_cast<std::size_t>(chunk % kOutboxDepth);
  return outboxes_ + number * header_->outbox_bytes;
}

void Channel::send(const Call& call) {
  Lane& me = lane(rank_);
  const auto n_taken = [&me] { return me.n_taken.load(std::memory_order_seq_cst); };
  const auto* from = static_cast<const std::byte*>(call.in);
  std::size_t n_left = call.count * size_of(call.dtype);
  do {  // a message of 0 bytes is one chunk
    const std::uint64_t chunk = me.n_sent.load(std::memory_order_relaxed);
    for (std::uint64_t taken; chunk - (taken = n_taken()) >= kOutboxDepth;) {
      // The oldest chunk may be for another rank, which must free the entry.
      const int receiver =
          me.heads[taken % kOutboxDepth].destination.load(std::memory_order_relaxed);
      wait(call, receiver, [&] { return n_taken() != taken; });
    }
    const std::size_t n = std::min<std::size_t>(n_left, header_->outbox_bytes);
    if (n > n_backed_outbox_bytes_) back_outbox(call, n);
    MessageHead& head = me.heads[chunk % kOutboxDepth];
    // Release: see wait_for_chunk.
    head.destination.store(call.root, std::memory_order_release);
    head.dtype = static_cast<std::uint32_t>(call.dtype);
    head.count = call.count;
    if (n > 0) std::memcpy(outbox(rank_, chunk), from, n);
    me.n_sent.store(chunk + 1, std::memory_order_seq_cst);
    wake_sleepers();
    from += n;
    n_left -= n;
  } while (n_left > 0);
}

std::uint64_t Channel::wait_for_chunk(const Call& call) {
  Lane& sender = lane(call.root);
  const auto n_taken = [&sender] { return sender.n_taken.load(std::memory_order_seq_cst); };
  const auto receiver_of = [&sender](std::uint64_t chunk) {
    return sender.heads[chunk % kOutboxDepth].destination.load(std::memory_order_acquire);
  };
  std::uint64_t oldest = 0, mine = 0;
  wait(call, call.root, [&] {
    oldest = n_taken();
    const std::uint64_t end = sender.n_sent.load(std::memory_order_seq_cst);
    for (mine = oldest; mine < end && receiver_of(mine) != rank_;) ++mine;
    // The oldest chunk may be taken meanwhile and its entry reused. If not, the chunk found is for
    // this rank and stays until this rank takes it.
    return mine < end && n_taken() == oldest;
  });
  // The chunk is here, even if the sender has left; but other ranks must take the chunks before it.
  for (; oldest != mine; oldest = n_taken()) {
    const int receiver = receiver_of(oldest);
    if (n_taken() == oldest) wait(call, receiver, [&] { return n_taken() != oldest; });
  }
  return mine;
}

void Channel::receive(const Call& call) {
  Lane& sender = lane(call.root);
  auto* to = static_cast<std::byte*>(call.out);
  std::size_t n_left = call.count * size_of(call.dtype);
  do {
    const std::uint64_t chunk = wait_for_chunk(call);
    const MessageHead& head = sender.heads[chunk % kOutboxDepth];
    if (head.count != call.count || head.dtype != static_cast<std::uint32_t>(call.dtype)) {
      fail(call, internal::Failure::Kind::mismatch,
           fmt::format("rank {} sent {} elements of {}, rank {} receives {} of {}; both ends must "
                       "name the same count and type. The sender's last call: {}",
                       call.number_of(call.root), head.count,
                       name_of(static_cast<DType>(head.dtype)), call.number_of(rank_), call.count,
                       name_of(call.dtype), call_of(call.root)),
           std::span(&call.root, 1));
    }
    const std::size_t n = std::min<std::size_t>(n_left, header_->outbox_bytes);
    if (n > 0) std::memcpy(to, outbox(call.root, chunk), n);
    sender.n_taken.store(chunk + 1, std::memory_order_seq_cst);
    wake_sleepers();
    to += n;
    n_left -= n;
  } while (n_left > 0);
}

}  // namespace lockstep::shared
