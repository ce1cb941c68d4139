#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "engines/shared/channel.hpp"
#include "engines/shared/record.hpp"

namespace lockstep::shared {

std::byte* Channel::outbox(int rank, std::uint64_t chunk) const noexcept {
  const std::size_t number = static_cast<std::size_t>(rank) * kOutboxDepth +
                             static_cast<std::size_t>(chunk % kOutboxDepth);
  return outboxes_ + number * header_->outbox_bytes;
}

void Channel::send(const Call& call) {
  Lane& me = lane(rank_);
  const auto* from = static_cast<const std::byte*>(call.in);
  std::size_t n_left = call.count * size_of(call.dtype);
  do {  // a message of no bytes is a chunk too
    const std::uint64_t chunk = me.n_sent.load(std::memory_order_relaxed);
    wait(call, call.root, [&me, chunk] {
      return chunk - me.n_taken.load(std::memory_order_seq_cst) < kOutboxDepth;
    });
    const std::size_t n = std::min<std::size_t>(n_left, header_->outbox_bytes);
    MessageHead& head = me.heads[chunk % kOutboxDepth];
    head.destination.store(call.root, std::memory_order_relaxed);
    head.dtype = static_cast<std::uint32_t>(call.dtype);
    head.count = call.count;
    if (n > 0) std::memcpy(outbox(rank_, chunk), from, n);
    me.n_sent.store(chunk + 1, std::memory_order_seq_cst);
    wake_sleepers();
    from += n;
    n_left -= n;
  } while (n_left > 0);
}

void Channel::receive(const Call& call) {
  Lane& sender = lane(call.root);
  auto* to = static_cast<std::byte*>(call.out);
  std::size_t n_left = call.count * size_of(call.dtype);
  do {
    std::uint64_t chunk = 0;
    wait(call, call.root, [this, &sender, &chunk] {
      chunk = sender.n_taken.load(std::memory_order_seq_cst);
      if (sender.n_sent.load(std::memory_order_seq_cst) <= chunk) return false;
      const MessageHead& head = sender.heads[chunk % kOutboxDepth];
      if (head.destination.load(std::memory_order_acquire) != rank_) return false;
      // Another receiver may have taken the chunk meanwhile and its place hold a later one. If
      // not, the chunk is this rank's, and stays until this rank takes it.
      return sender.n_taken.load(std::memory_order_seq_cst) == chunk;
    });
    const MessageHead& head = sender.heads[chunk % kOutboxDepth];
    if (head.count != call.count || head.dtype != static_cast<std::uint32_t>(call.dtype)) {
      fail(call, FailureKind::mismatch,
           fmt::format("rank {} sent {} elements of {}, rank {} receives {} of {}; both ends must "
                       "name the same count and type. The sender's last call: {}",
                       call.root, head.count, name_of(static_cast<DType>(head.dtype)), rank_,
                       call.count, name_of(call.dtype), call_of(call.root)));
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
