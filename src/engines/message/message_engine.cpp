#include "engines/message/message_engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <lockstep/error.hpp>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engines/message/header.hpp"
#include "engines/message/message_channel.hpp"
#include "group/check.hpp"
#include "kernels/reduce.hpp"

namespace lockstep::message {
namespace {

using Way = Message::Way;

/// Up to this size every rank sends all its data to all ranks (one exchange); above it, each
/// rank reduces a slice (two exchanges).
constexpr std::size_t kFlatBytes = 16 << 10;
/// The root of a reduce buffers this much per rank at a time.
constexpr std::size_t kChunkBytes = 16 << 20;

class Memory final : public SharedMemory {
 public:
  explicit Memory(std::size_t n_bytes) : bytes_(n_bytes) {}
  std::byte* data() const noexcept override { return bytes_.data(); }

 private:
  mutable std::vector<std::byte> bytes_;
};

/// Every operation as messages between the ranks: first headers, which are compared, with eager
/// data; then the remaining data. If LOCKSTEP_CHECK is off, data only. This engine reduces
/// itself: in rank order, for every type, with the same bits on all ranks.
class MessageEngine final : public Engine {
 public:
  MessageEngine(std::string name, std::unique_ptr<Channel> channel);

  std::string_view name() const noexcept override { return name_; }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  bool reports_progress() const noexcept override { return true; }
  void run(const Call& call) override;
  std::unique_ptr<Engine> split(const Call& call, int color, int key) override;
  std::unique_ptr<SharedMemory> allocate(const Call& call) override {
    Limit limit(call.timeout);
    auto memory = make_memory(call);  // first: all ranks get their buffer or none does
    compare(call, headers_.of(call), {}, limit);
    return memory;
  }
  void abandon(std::string_view reason) noexcept override { channel_->abandon(reason); }
  void end_with(const Error& error) noexcept override { channel_->end_with(error); }
  void leave(std::string_view failure) noexcept override { channel_->leave(failure); }

 private:
  std::unique_ptr<Memory> make_memory(const Call& call) {
    try {
      return std::make_unique<Memory>(call.count);
    } catch (const std::bad_alloc&) {
      const SystemError error(
          context_of(call, rank_), ENOMEM,
          fmt::format("cannot allocate a buffer of {} bytes; free memory, or raise the limits "
                      "(ulimit -v, the container's memory)",
                      call.count));
      channel_->end_with(error);
      throw SystemError(error);
    }
  }

  /// One step of a call: its messages and the call they belong to.
  struct Step {
    Channel& channel;
    const Call& call;
    Limit& limit;
    std::vector<Message>& messages;  // empty between steps: its capacity is reused

    void send(int peer, const void* data, std::size_t n_bytes) {
      if (peer == channel.rank() || n_bytes == 0) return;
      messages.push_back({Way::send, peer, const_cast<void*>(data), n_bytes});
    }
    void receive(int peer, void* data, std::size_t n_bytes) {
      if (peer == channel.rank() || n_bytes == 0) return;
      messages.push_back({Way::receive, peer, data, n_bytes});
    }
    void run() {
      channel.exchange(messages, call, limit);
      messages.clear();
    }
  };

  /// Exchanges every rank's first message, into firsts_. Throws if they disagree.
  void compare(const Call& call, const Header& mine, std::span<const std::byte> payload,
               Limit& limit);
  void perform(const Call& call);
  void fail_mismatch(const Call& call);
  /// How many bytes this rank sends eagerly in the first message; nullopt: none, they follow.
  std::optional<std::size_t> eager_bytes(const Call& call) const;
  void complete_eager(const Call& call);
  /// Compares send and recv of two ranks, whose source lines differ. True: the data was eager.
  bool compare_pair(const Call& call, Limit& limit);
  void all_reduce(Step step);
  void reduce(Step step);
  void gather(Step step, bool is_for_all);
  void reduce_scatter(Step step);
  void all_to_all(Step step);
  /// out <- reduction of this rank's `own` and the peers' parts in `parts`, n_bytes each.
  void reduce_parts(const Call& call, const std::byte* own, std::byte* parts, std::size_t n_bytes,
                    std::byte* out);
  bool is(int r) const { return r == rank(); }

  std::string name_;
  std::unique_ptr<Channel> channel_;
  const int rank_ = channel_->rank();
  const int size_ = channel_->size();
  HeaderMaker headers_;
  std::vector<First> firsts_{static_cast<std::size_t>(size_)};
  std::vector<const void*> payloads_;  // of firsts_
  std::vector<Message> first_messages_;
  std::vector<Message> messages_;
  std::vector<const void*> in_;
  std::vector<std::byte> scratch_;
};

std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }
const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }

/// Copies data that stays on its rank; `to` and `from` may be equal.
void keep(void* to, const void* from, std::size_t n_bytes) {
  if (n_bytes > 0 && to != from) std::memmove(to, from, n_bytes);
}

MessageEngine::MessageEngine(std::string name, std::unique_ptr<Channel> channel)
    : name_(std::move(name)), channel_(std::move(channel)) {
  First* const own = &firsts_[static_cast<std::size_t>(rank())];
  for (int r = 0; r < size(); ++r) {
    First* const other = &firsts_[static_cast<std::size_t>(r)];
    payloads_.push_back(other->payload.data());
    if (is(r)) continue;
    first_messages_.push_back({Way::send, r, own, sizeof(First)});
    first_messages_.push_back({Way::receive, r, other, sizeof(First)});
  }
  channel_->prepare(first_messages_);
}

void MessageEngine::compare(const Call& call, const Header& mine,
                            std::span<const std::byte> payload, Limit& limit) {
  First& own = firsts_[static_cast<std::size_t>(rank())];
  own.header = mine;
  keep(own.payload.data(), payload.data(), payload.size());
  channel_->exchange(first_messages_, call, limit);
  const bool compares_sites = call.check == Check::full;
  for (const First& other : firsts_) {
    if (!agree(mine, other.header, compares_sites)) return fail_mismatch(call);
  }
}

void MessageEngine::fail_mismatch(const Call& call) {
  std::vector<Row> rows;
  for (int r = 0; r < size(); ++r) {
    rows.push_back({r, firsts_[static_cast<std::size_t>(r)].header});
  }
  channel_->fail(difference_of(rows), call);
}

std::optional<std::size_t> MessageEngine::eager_bytes(const Call& call) const {
  std::size_t count = call.count, most = count;
  switch (call.op) {
    case Op::all_gather:
    case Op::gather:
      if (!call.counts.empty()) {
        count = call.counts[static_cast<std::size_t>(rank())];
        most = *std::ranges::max_element(call.counts);  // the same value on all ranks
      }
      break;
    case Op::barrier:
    case Op::all_reduce:
    case Op::reduce:
    case Op::broadcast: break;
    case Op::scatter:
    case Op::reduce_scatter:
    case Op::all_to_all:
    case Op::send:
    case Op::recv:
    case Op::split:
    case Op::allocate: return std::nullopt;
  }
  if (call.op == Op::barrier) return 0;
  if (most * size_of(call.dtype) > sizeof(First::payload)) return std::nullopt;
  return count * size_of(call.dtype);
}

void MessageEngine::complete_eager(const Call& call) {
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  const auto payload = [this](int r) { return payloads_[static_cast<std::size_t>(r)]; };
  if (call.op == Op::broadcast) {
    keep(call.out, payload(call.root), n_bytes);
  } else if (call.op == Op::all_reduce || (call.op == Op::reduce && is(call.root))) {
    if (call.count > 0) {
      kernels::reduce(call.dtype, call.reduce, payloads_.data(), size(), call.out, call.count);
    }
  } else if (call.op == Op::all_gather || (call.op == Op::gather && is(call.root))) {
    std::size_t at = 0;
    for (int r = 0; r < size(); ++r) {
      const std::size_t part =
          (call.counts.empty() ? call.count : call.counts[static_cast<std::size_t>(r)]) *
          size_of(call.dtype);
      keep(bytes(call.out) + at, payload(r), part);
      at += part;
    }
  }
}

bool MessageEngine::compare_pair(const Call& call, Limit& limit) {
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  const bool is_eager = n_bytes <= sizeof(First::payload);
  First mine{headers_.of(call), {}};
  First other{};
  if (is_eager && call.op == Op::send) keep(mine.payload.data(), call.in, n_bytes);
  const std::array<Message, 2> messages = {Message{Way::send, call.root, &mine, sizeof(mine)},
                                           Message{Way::receive, call.root, &other, sizeof(other)}};
  channel_->exchange(messages, call, limit);
  const Op wanted = call.op == Op::send ? Op::recv : Op::send;
  const Header& header = other.header;
  if (static_cast<Op>(header.step) != wanted || header.root != rank() ||
      header.dtype != mine.header.dtype || header.count != mine.header.count) {
    std::array<Row, 2> rows{Row{rank(), mine.header}, Row{call.root, header}};
    if (rows[0].rank > rows[1].rank) std::swap(rows[0], rows[1]);
    channel_->fail(difference_of(rows), call);
  }
  if (is_eager && call.op == Op::recv) keep(call.out, other.payload.data(), n_bytes);
  return is_eager;
}

void MessageEngine::run(const Call& call) {
  try {
    perform(call);
  } catch (const Error&) {  // known to the peers
    throw;
  } catch (const std::exception& error) {  // no memory, for example
    channel_->abandon(error.what());
    throw;
  }
}

void MessageEngine::perform(const Call& call) {
  Limit limit(call.timeout);
  Step step{*channel_, call, limit, messages_};
  const bool is_pair = call.op == Op::send || call.op == Op::recv;
  // A barrier consists of this message only.
  if (call.check != Check::off || call.op == Op::barrier) {
    if (is_pair) {
      if (compare_pair(call, limit)) return;
    } else if (const auto n = eager_bytes(call)) {
      compare(call, headers_.of(call), {bytes(call.in), *n}, limit);
      return complete_eager(call);
    } else {
      compare(call, headers_.of(call), {}, limit);
    }
  }
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  switch (call.op) {
    case Op::barrier:
    case Op::split:
    case Op::allocate: break;
    case Op::all_reduce: all_reduce(step); break;
    case Op::reduce: reduce(step); break;
    case Op::broadcast:
      for (int r = 0; is(call.root) && r < size(); ++r) step.send(r, call.out, n_bytes);
      step.receive(call.root, call.out, n_bytes);
      step.run();
      break;
    case Op::all_gather: gather(step, /*is_for_all=*/true); break;
    case Op::gather: gather(step, /*is_for_all=*/false); break;
    case Op::scatter:
      for (int r = 0; is(call.root) && r < size(); ++r) {
        step.send(r, bytes(call.in) + static_cast<std::size_t>(r) * n_bytes, n_bytes);
      }
      step.receive(call.root, call.out, n_bytes);
      step.run();
      if (is(call.root)) {
        keep(call.out, bytes(call.in) + static_cast<std::size_t>(rank()) * n_bytes, n_bytes);
      }
      break;
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

void MessageEngine::reduce_parts(const Call& call, const std::byte* own, std::byte* parts,
                                 std::size_t n_bytes, std::byte* out) {
  if (n_bytes == 0) return;
  in_.clear();
  for (int r = 0; r < size(); ++r) {
    in_.push_back(is(r) ? own : parts + static_cast<std::size_t>(r) * n_bytes);
  }
  kernels::reduce(call.dtype, call.reduce, in_.data(), size(), out, n_bytes / size_of(call.dtype));
}

void MessageEngine::all_reduce(Step step) {
  const Call& call = step.call;
  const auto n = static_cast<std::size_t>(size());
  const std::size_t element = size_of(call.dtype), n_bytes = call.count * element;
  std::byte* const data = bytes(call.out);
  if (n_bytes <= kFlatBytes) {
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
  const std::size_t n_pieces = (whole - 1) / channel_->piece_bytes() + 1;
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

void MessageEngine::reduce(Step step) {
  const Call& call = step.call;
  const std::size_t n_bytes = call.count * size_of(call.dtype);
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

void MessageEngine::gather(Step step, bool is_for_all) {
  const Call& call = step.call;
  const std::size_t element = size_of(call.dtype);
  const auto part = [&](int r) {
    return (call.counts.empty() ? call.count : call.counts[static_cast<std::size_t>(r)]) * element;
  };
  std::size_t at = 0;
  for (int r = 0; r < size(); ++r) {
    if (is_for_all || is(call.root)) {
      step.receive(r, bytes(call.out) + at, part(r));
      if (is(r)) keep(bytes(call.out) + at, call.in, part(r));
    }
    if (is_for_all || r == call.root) step.send(r, call.in, part(rank()));
    at += part(r);
  }
  step.run();
}

void MessageEngine::reduce_scatter(Step step) {
  const Call& call = step.call;
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  scratch_.resize(static_cast<std::size_t>(size()) * n_bytes);
  for (int r = 0; r < size(); ++r) {
    step.send(r, bytes(call.in) + static_cast<std::size_t>(r) * n_bytes, n_bytes);
    step.receive(r, scratch_.data() + static_cast<std::size_t>(r) * n_bytes, n_bytes);
  }
  step.run();
  reduce_parts(call, bytes(call.in) + static_cast<std::size_t>(rank()) * n_bytes, scratch_.data(),
               n_bytes, bytes(call.out));
}

void MessageEngine::all_to_all(Step step) {
  const Call& call = step.call;
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  for (int r = 0; r < size(); ++r) {
    const std::size_t at = static_cast<std::size_t>(r) * n_bytes;
    step.send(r, bytes(call.in) + at, n_bytes);
    step.receive(r, bytes(call.out) + at, n_bytes);
    if (is(r)) keep(bytes(call.out) + at, bytes(call.in) + at, n_bytes);
  }
  step.run();
}

std::unique_ptr<Engine> MessageEngine::split(const Call& call, int color, int key) {
  Limit limit(call.timeout);
  compare(call, headers_.of(call, color, key), {}, limit);
  const auto said = [this](int r) { return firsts_[static_cast<std::size_t>(r)].header; };
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    if (said(r).color == color) members.push_back(r);
  }
  std::ranges::stable_sort(members, {}, [&](int r) { return said(r).key; });
  return std::make_unique<MessageEngine>(name_, channel_->split(members, call, limit));
}

}  // namespace

std::unique_ptr<Engine> make(std::string name, std::unique_ptr<Transport> transport) {
  return std::make_unique<MessageEngine>(std::move(name),
                                         std::make_unique<Channel>(std::move(transport)));
}

}  // namespace lockstep::message
