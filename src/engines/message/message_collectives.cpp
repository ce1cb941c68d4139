#include "engines/message/message_collectives.hpp"

#include <algorithm>
#include <functional>

#include "base/bytes.hpp"
#include "kernels/reduce.hpp"

namespace lockstep::message {
namespace {

using base::bytes;
using base::copy_bytes;

/// Above this size each rank of an all_reduce reduces a slice, in two exchanges.
constexpr std::size_t kFlatBytes = 16 << 10;
/// Above this size, a broadcast or reduce between more than two ranks of one host is sent in
/// slices.
constexpr std::size_t kSlicedBytes = 256 << 10;
/// Parts of up to this size are forwarded by other ranks, which costs copies.
constexpr std::size_t kForwardedBytes = 2 << 10;
/// The root of a reduce buffers this much per rank at a time.
constexpr std::size_t kChunkBytes = 16 << 20;

}  // namespace

void Collectives::Step::run() {
  // Windows add latency: they are used if that is at most 1 %.
  constexpr double kMinRounds = 100;
  std::size_t most_bytes = 0;
  for (const Message& message : messages) most_bytes = std::max(most_bytes, message.n_bytes);
  const double window_us =
      MessageChannel::kWindow * static_cast<double>(most_bytes) * costs.byte_us;
  if (channel.has_rounds() && !channel.is_on_one_host() &&
      window_us >= kMinRounds * costs.round_us) {
    channel.exchange_in_windows(messages, call, limit);
  } else {
    channel.exchange(messages, call, limit);
  }
  messages.clear();
}

void Collectives::run(const Call& call, Limit& limit) {
  Step step{channel_, call, limit, costs_, messages_};
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

bool Collectives::is_faster_in_rounds(int n_exchanges, double n_bytes) const {
  return rounds_ != nullptr &&
         n_exchanges * (n_rounds() * costs_.round_us - (size() - 1) * costs_.message_us) +
                 n_bytes * costs_.byte_us <
             0;
}

bool Collectives::is_sent_flat(std::size_t n_bytes, Data data) const {
  if (n_bytes > kFlatBytes || channel_.is_on_one_host()) return n_bytes <= kFlatBytes;
  // Each rank then sends more bytes, in one exchange less; with the headers, in two less.
  const double n_others = size() - 1, n_more = n_others - 2 * n_others / size();
  return static_cast<double>(n_bytes) * n_more * costs_.byte_us <=
         (data == Data::with_headers ? 2 : 1) * exchange_us();
}

bool Collectives::is_sent_in_slices(std::size_t n_bytes, Data data) const {
  if (size() <= 2) return false;
  if (rounds_ != nullptr) return n_bytes > kForwardedBytes;
  if (channel_.is_on_one_host()) return n_bytes > kSlicedBytes;
  // The root then sends or receives all data twice and not once for each other rank, in one
  // exchange more.
  const double n_others = size() - 1, n_saved = n_others - 2 * n_others / size();
  return static_cast<double>(n_bytes) * n_saved * costs_.byte_us >
         (n_others - 1) * costs_.message_us + costs_.round_us +
             (data == Data::with_headers ? exchange_us() : 0);
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
  // A tree sends all data in each round, slices all data twice.
  if (is_faster_in_rounds(1, static_cast<double>(n_bytes) * (n_rounds() - 2))) {
    return rounds_->broadcast(bytes(call.out), n_bytes, call.root, call, step.limit);
  }
  if (!is_sent_in_slices(n_bytes, Data::follows)) {
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
  if (rounds_ != nullptr && n_bytes <= kForwardedBytes) {
    return rounds_->scatter(bytes(call.in), bytes(call.out), n_bytes, call.root, call, step.limit);
  }
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

bool Collectives::is_all_to_all_faster_in_rounds(std::size_t part_bytes) const {
  return is_faster_in_rounds(1, static_cast<double>(part_bytes) * size() * (0.5 * n_rounds() - 1));
}

void Collectives::all_reduce(Step step) {
  const Call& call = step.call;
  const auto n = static_cast<std::size_t>(size());
  const std::size_t element = size_of(call.dtype), n_bytes = call.count * element;
  std::byte* const data = bytes(call.out);
  if (n_bytes == 0) return;
  // Either every rank reduces all data, or a slice, in twice as many rounds; then each byte of the
  // others' slices is sent log2(N) / 2 times and not once.
  const double n_more_bytes = (size() - 0.5 * n_rounds() - 1) * static_cast<double>(n_bytes);
  if (rounds_ != nullptr && n_more_bytes * costs_.byte_us < n_rounds() * costs_.round_us) {
    scratch_.resize(n * n_bytes);
    rounds_->all_gather(data, scratch_.data(), n_bytes, call, step.limit);
    return reduce_parts(call, data, scratch_.data(), n_bytes, data);
  }
  if (is_faster_in_rounds(2, static_cast<double>(n_bytes) * (0.5 * n_rounds() - 1))) {
    const std::size_t slice = (call.count + n - 1) / n * element;
    std::vector<std::byte> padded(n * slice), parts(n * slice);
    copy_bytes(padded.data(), data, n_bytes);
    rounds_->all_to_all(padded.data(), parts.data(), slice, call, step.limit);
    std::byte* const own = padded.data() + static_cast<std::size_t>(rank()) * slice;
    reduce_parts(call, own, parts.data(), slice, own);
    rounds_->all_gather(own, parts.data(), slice, call, step.limit);
    return copy_bytes(data, parts.data(), n_bytes);
  }
  if (rounds_ == nullptr && is_sent_flat(n_bytes, Data::follows)) {
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
  if (rounds_ != nullptr && n_bytes > 0 && n_bytes <= kForwardedBytes) {
    if (is(call.root)) scratch_.resize(static_cast<std::size_t>(size()) * n_bytes);
    rounds_->gather(bytes(call.in), scratch_.data(), n_bytes, call.root, call, step.limit);
    if (is(call.root)) {
      reduce_parts(call, bytes(call.out), scratch_.data(), n_bytes, bytes(call.out));
    }
    return;
  }
  if (is_sent_in_slices(n_bytes, Data::follows)) return reduce_in_slices(step);
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
  const bool are_equal =
      std::ranges::adjacent_find(call.counts, std::not_equal_to()) == call.counts.end();
  if (rounds_ != nullptr && are_equal && call.count * element <= kForwardedBytes) {
    const std::size_t part_bytes = call.count * element;
    if (part_bytes == 0) return;
    if (is_for_all) {
      return rounds_->all_gather(bytes(call.in), bytes(call.out), part_bytes, call, step.limit);
    }
    return rounds_->gather(bytes(call.in), bytes(call.out), part_bytes, call.root, call,
                           step.limit);
  }
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
  if (is_all_to_all_faster_in_rounds(n_bytes)) {
    rounds_->all_to_all(bytes(call.in), scratch_.data(), n_bytes, call, step.limit);
  } else {
    for (int r = 0; r < size(); ++r) {
      step.send(r, bytes(call.in) + static_cast<std::size_t>(r) * n_bytes, n_bytes);
      step.receive(r, scratch_.data() + static_cast<std::size_t>(r) * n_bytes, n_bytes);
    }
    step.run();
  }
  reduce_parts(call, bytes(call.in) + static_cast<std::size_t>(rank()) * n_bytes, scratch_.data(),
               n_bytes, bytes(call.out));
}

void Collectives::all_to_all(Step step) {
  const Call& call = step.call;
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  if (n_bytes == 0) return;
  if (is_all_to_all_faster_in_rounds(n_bytes)) {
    return rounds_->all_to_all(bytes(call.in), bytes(call.out), n_bytes, call, step.limit);
  }
  for (int r = 0; r < size(); ++r) {
    const std::size_t at = static_cast<std::size_t>(r) * n_bytes;
    step.send(r, bytes(call.in) + at, n_bytes);
    step.receive(r, bytes(call.out) + at, n_bytes);
    if (is(r)) copy_bytes(bytes(call.out) + at, bytes(call.in) + at, n_bytes);
  }
  step.run();
}

}  // namespace lockstep::message
