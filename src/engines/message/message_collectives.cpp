#include "engines/message/message_collectives.hpp"

#include <algorithm>
#include <bit>
#include <span>

#include "base/bytes.hpp"
#include "kernels/reduce.hpp"

namespace lockstep::message {
namespace {

using base::bytes;
using base::copy_bytes;

/// Above this size each rank of an all_reduce reduces a slice, in two exchanges.
constexpr std::size_t kFlatBytes = 16 << 10;
/// Between hosts so it does, and a broadcast or reduce is sent in slices, if whole data would be
/// more than this for a rank: 40 KiB take 13 us at 25 Gbit/s, as long as two exchanges of 8 ranks.
constexpr std::size_t kReceivedBytes = 40 << 10;
/// Above this size, a broadcast or reduce between more than two ranks of one host is sent in
/// slices.
constexpr std::size_t kSlicedBytes = 256 << 10;
/// Messages of more than this are sent in windows between more than Transport::kMaxDirect hosts. A
/// window adds a latency, 1 % of the time that its bytes take at 25 Gbit/s.
constexpr std::size_t kWindowBytes = 64 << 10;
constexpr int kWindow = 8;
/// The root of a reduce buffers this much per rank at a time.
constexpr std::size_t kChunkBytes = 16 << 20;

}  // namespace

void Collectives::Step::run() {
  const bool is_any_long = std::ranges::any_of(
      messages, [](const Message& message) { return message.n_bytes > kWindowBytes; });
  if (channel.has_levels() && !channel.is_on_one_host() && is_any_long) {
    run_in_windows();
  } else {
    channel.exchange(messages, call, limit);
  }
  messages.clear();
}

/// The index of a message in the order of exchange: both ranks of a message compute the same index,
/// no two messages to one rank, or from one rank, share an index, and neighbouring ranks come
/// first. Blocks of B ranks, the largest power of two that divides N, exchange in a ring, and
/// within a pair of blocks rank i exchanges with i XOR 0, 1, ... B - 1. With aligned blocks, the
/// messages of a window cross equally many switches, so they complete at about the same time.
int Collectives::Step::exchange_index(const Message& message) const {
  const int shift = std::countr_zero(static_cast<unsigned>(subset.size));  // B is 1 << shift
  const bool is_sent = message.direction == Message::Direction::send;
  const int peer = subset.rank_of(message.peer);
  const int from = is_sent ? subset.rank : peer, to = is_sent ? peer : subset.rank;
  int n_blocks = (to >> shift) - (from >> shift);
  if (n_blocks < 0) n_blocks += subset.size >> shift;
  return (n_blocks << shift) + ((from ^ to) & ((1 << shift) - 1));
}

/// Exchanges long messages, a few at a time in each direction. A network shares a link among the
/// messages on it, so sending all at once would leave 1/N of it to a short message of another
/// group.
///
/// A rank completes a window before it begins the next. A message waits only for a rank in the same
/// or an earlier window, so the ranks in the earliest one always get on: no deadlock. If a rank
/// stops, those that wait for it do not begin their next window, for which others wait. All publish
/// for which ranks they wait (wait states), and so find the one that waits for none: it is late.
void Collectives::Step::run_in_windows() {
  const auto window_of = [this](const Message& message) {
    return exchange_index(message) / kWindow;
  };
  // Messages between two ranks stay in order.
  std::ranges::stable_sort(messages, {},
                           [this](const Message& message) { return exchange_index(message); });
  const std::span<const Message> all(messages);
  for (std::size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    const int window = window_of(all[begin]);
    while (end < all.size() && window_of(all[end]) == window) ++end;
    channel.exchange(all.subspan(begin, end - begin), call, limit);
  }
}

void Collectives::run(const Call& call, Limit& limit) {
  Step step{channel_, subset_, call, limit, messages_};
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  switch (call.op) {
    case Op::barrier:
    case Op::split:
    case Op::allocate: break;
    case Op::all_reduce: all_reduce(step); break;
    case Op::reduce: reduce(step); break;
    case Op::broadcast: broadcast(step); break;
    case Op::all_gather: gather(step, /*is_for_all=*/true); break;
    case Op::gather: gather(step, /*is_for_all=*/false); break;
    case Op::scatter: scatter(step); break;
    case Op::reduce_scatter: reduce_scatter(step); break;
    case Op::all_to_all: all_to_all(step); break;
    case Op::send:
      step.send(call.root, call.in, n_bytes);
      step.run();
      break;
    case Op::recv:
      step.receive(call.root, call.out, n_bytes);
      step.run();
      break;
  }
}

bool Collectives::is_long_for_all(std::size_t n_bytes) const {
  return n_bytes * static_cast<std::size_t>(size() - 1) > kReceivedBytes;
}

bool Collectives::is_sent_flat(std::size_t n_bytes) const {
  return n_bytes <= kFlatBytes && (channel_.is_on_one_host() || !is_long_for_all(n_bytes));
}

bool Collectives::is_sent_in_slices(std::size_t n_bytes) const {
  if (size() <= 2) return false;
  return channel_.is_on_one_host() ? n_bytes > kSlicedBytes : is_long_for_all(n_bytes);
}

Collectives::Slice Collectives::slice_of(const Call& call, int r) const {
  const std::size_t element = size_of(call.dtype), n = static_cast<std::size_t>(size());
  const std::size_t begin = call.count * static_cast<std::size_t>(r) / n;
  const std::size_t end = call.count * (static_cast<std::size_t>(r) + 1) / n;
  return {begin * element, (end - begin) * element};
}

void Collectives::broadcast(Step step) {
  const Call& call = step.call;
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  if (n_bytes == 0) return;
  if (!is_sent_in_slices(n_bytes)) {
    for (int r = 0; is(call.root) && r < size(); ++r) step.send(r, call.out, n_bytes);
    step.receive(call.root, call.out, n_bytes);
    return step.run();
  }
  // Each rank receives its slice from the root and sends it to the others.
  const Slice mine = slice_of(call, rank());
  for (int r = 0; is(call.root) && r < size(); ++r) {
    const Slice slice = slice_of(call, r);
    step.send(r, bytes(call.out) + slice.at, slice.n_bytes);
  }
  step.receive(call.root, bytes(call.out) + mine.at, mine.n_bytes);
  step.run();
  for (int r = 0; r < size(); ++r) {
    const Slice slice = slice_of(call, r);
    if (r != call.root) step.send(r, bytes(call.out) + mine.at, mine.n_bytes);
    if (!is(call.root)) step.receive(r, bytes(call.out) + slice.at, slice.n_bytes);
  }
  step.run();
}

void Collectives::scatter(Step step) {
  const Call& call = step.call;
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  if (n_bytes == 0) return;
  for (int r = 0; is(call.root) && r < size(); ++r) {
    step.send(r, bytes(call.in) + static_cast<std::size_t>(r) * n_bytes, n_bytes);
  }
  step.receive(call.root, call.out, n_bytes);
  step.run();
  if (is(call.root)) {
    copy_bytes(call.out, bytes(call.in) + static_cast<std::size_t>(rank()) * n_bytes, n_bytes);
  }
}

void Collectives::reduce_parts(const Call& call, const std::byte* own, std::byte* parts,
                               std::size_t n_bytes, std::byte* out) {
  if (n_bytes == 0) return;
  in_.clear();
  for (int r = 0; r < size(); ++r) {
    in_.push_back(is(r) ? own : parts + static_cast<std::size_t>(r) * n_bytes);
  }
  kernels::reduce(call.dtype, call.reduce, in_.data(), size(), out, n_bytes / size_of(call.dtype));
}

void Collectives::all_reduce(Step step) {
  const Call& call = step.call;
  const auto n = static_cast<std::size_t>(size());
  const std::size_t element = size_of(call.dtype), n_bytes = call.count * element;
  std::byte* const data = bytes(call.out);
  if (n_bytes == 0) return;
  if (is_sent_flat(n_bytes)) {
    scratch_.resize(n * n_bytes);
    for (std::size_t r = 0; r < n; ++r) {
      step.send(static_cast<int>(r), data, n_bytes);
      step.receive(static_cast<int>(r), scratch_.data() + r * n_bytes, n_bytes);
    }
    step.run();
    reduce_parts(call, data, scratch_.data(), n_bytes, data);
    return;
  }
  // Rank r reduces slice r in pieces: received pieces are summed while they are in the cache, and
  // sent with the next exchange.
  const std::size_t whole = (call.count + n - 1) / n * element;  // the longest slice
  const std::size_t n_pieces = (whole - 1) / channel_.piece_bytes() + 1;
  struct Part {
    std::byte* data;
    std::size_t n_bytes;
  };
  const auto part = [&](std::size_t r, std::size_t piece) -> Part {
    const std::size_t first = call.count * r / n;
    const std::size_t count = call.count * (r + 1) / n - first;
    const std::size_t begin = count * piece / n_pieces;
    return {data + (first + begin) * element, (count * (piece + 1) / n_pieces - begin) * element};
  };
  const auto me = static_cast<std::size_t>(rank());
  scratch_.resize(n * ((whole / element + n_pieces - 1) / n_pieces) * element);
  for (std::size_t piece = 0; piece <= n_pieces; ++piece) {
    const Part mine = part(me, piece);
    for (std::size_t r = 0; r < n; ++r) {
      const auto peer = static_cast<int>(r);
      if (piece > 0) {
        const Part sum = part(me, piece - 1);
        step.send(peer, sum.data, sum.n_bytes);
        const Part other = part(r, piece - 1);
        step.receive(peer, other.data, other.n_bytes);
      }
      if (piece < n_pieces) {
        const Part other = part(r, piece);
        step.send(peer, other.data, other.n_bytes);
        step.receive(peer, scratch_.data() + r * mine.n_bytes, mine.n_bytes);
      }
    }
    step.run();
    if (piece < n_pieces) reduce_parts(call, mine.data, scratch_.data(), mine.n_bytes, mine.data);
  }
}

void Collectives::reduce(Step step) {
  const Call& call = step.call;
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  if (is_sent_in_slices(n_bytes)) return reduce_in_slices(step);
  for (std::size_t at = 0; at < n_bytes; at += kChunkBytes) {
    const std::size_t now = std::min(kChunkBytes, n_bytes - at);
    if (!is(call.root)) {
      step.send(call.root, bytes(call.in) + at, now);
      step.run();
      continue;
    }
    scratch_.resize(static_cast<std::size_t>(size()) * now);
    for (int r = 0; r < size(); ++r) {
      step.receive(r, scratch_.data() + static_cast<std::size_t>(r) * now, now);
    }
    step.run();
    reduce_parts(call, bytes(call.out) + at, scratch_.data(), now, bytes(call.out) + at);
  }
}

void Collectives::reduce_in_slices(Step step) {
  const Call& call = step.call;
  const Slice mine = slice_of(call, rank());
  scratch_.resize((static_cast<std::size_t>(size()) + 1) * mine.n_bytes);
  std::byte* const sum = scratch_.data() + static_cast<std::size_t>(size()) * mine.n_bytes;
  for (int r = 0; r < size(); ++r) {
    const Slice slice = slice_of(call, r);
    step.send(r, bytes(call.in) + slice.at, slice.n_bytes);
    step.receive(r, scratch_.data() + static_cast<std::size_t>(r) * mine.n_bytes, mine.n_bytes);
  }
  step.run();
  reduce_parts(call, bytes(call.in) + mine.at, scratch_.data(), mine.n_bytes, sum);
  if (is(call.root)) copy_bytes(bytes(call.out) + mine.at, sum, mine.n_bytes);
  step.send(call.root, sum, mine.n_bytes);
  for (int r = 0; is(call.root) && r < size(); ++r) {
    const Slice slice = slice_of(call, r);
    step.receive(r, bytes(call.out) + slice.at, slice.n_bytes);
  }
  step.run();
}

void Collectives::gather(Step step, bool is_for_all) {
  const Call& call = step.call;
  const std::size_t element = size_of(call.dtype);
  const auto part = [&](int r) {
    return (call.counts.empty() ? call.count : call.counts[static_cast<std::size_t>(r)]) * element;
  };
  std::size_t at = 0;
  for (int r = 0; r < size(); ++r) {
    if (is_for_all || is(call.root)) {
      step.receive(r, bytes(call.out) + at, part(r));
      if (is(r)) copy_bytes(bytes(call.out) + at, call.in, part(r));
    }
    if (is_for_all || r == call.root) step.send(r, call.in, part(rank()));
    at += part(r);
  }
  step.run();
}

void Collectives::reduce_scatter(Step step) {
  const Call& call = step.call;
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  if (n_bytes == 0) return;
  scratch_.resize(static_cast<std::size_t>(size()) * n_bytes);
  for (int r = 0; r < size(); ++r) {
    step.send(r, bytes(call.in) + static_cast<std::size_t>(r) * n_bytes, n_bytes);
    step.receive(r, scratch_.data() + static_cast<std::size_t>(r) * n_bytes, n_bytes);
  }
  step.run();
  reduce_parts(call, bytes(call.in) + static_cast<std::size_t>(rank()) * n_bytes, scratch_.data(),
               n_bytes, bytes(call.out));
}

void Collectives::all_to_all(Step step) {
  const Call& call = step.call;
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  if (n_bytes == 0) return;
  for (int r = 0; r < size(); ++r) {
    const std::size_t at = static_cast<std::size_t>(r) * n_bytes;
    step.send(r, bytes(call.in) + at, n_bytes);
    step.receive(r, bytes(call.out) + at, n_bytes);
    if (is(r)) copy_bytes(bytes(call.out) + at, bytes(call.in) + at, n_bytes);
  }
  step.run();
}

}  // namespace lockstep::message
