#include "engines/message/message_engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <lockstep/error.hpp>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/bytes.hpp"
#include "base/memory.hpp"
#include "engines/message/eager_messages.hpp"
#include "engines/message/header.hpp"
#include "engines/message/message_channel.hpp"
#include "engines/message/message_collectives.hpp"
#include "engines/message/rounds.hpp"
#include "group/check.hpp"
#include "group/native_engine.hpp"
#include "kernels/reduce.hpp"
#include "record/signature.hpp"

namespace lockstep::message {
namespace {

using base::bytes;
using base::copy_bytes;

using Direction = Message::Direction;

class Memory final : public SharedMemory {
 public:
  explicit Memory(std::size_t n_bytes) : bytes_(n_bytes) {}
  std::byte* data() const noexcept override { return bytes_.data(); }

 private:
  mutable std::vector<std::byte> bytes_;
};

/// Every operation as messages between the ranks: first headers, which are compared, with eager
/// data; then the remaining data. If LOCKSTEP_CHECK is off, data only; barrier, split and allocate
/// compare headers even then. This engine reduces itself: in the order of the tree over ranks, for
/// every type, with the same bits on all ranks.
class MessageEngine final : public internal::NativeEngine {
 public:
  MessageEngine(std::string name, std::unique_ptr<MessageChannel> channel, const Costs& costs);

  std::string_view name() const noexcept override { return name_; }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  bool reports_progress() const noexcept override { return true; }
  bool reduces_moments() const noexcept override { return true; }
  std::string_view why_one_thread() const noexcept override { return channel_->why_one_thread(); }
  void run(const Call& call) override;
  std::unique_ptr<Engine> split(const Call& call, int color, int key) override;
  std::unique_ptr<SharedMemory> allocate(const Call& call) override {
    channel_->begin(call);
    Limit limit(call.timeout);
    auto memory = make_memory(call);  // first: all ranks get their buffer or none does
    compare(call, headers_.of(call), {}, limit);
    return memory;
  }
  void refuse(const Refusal& refusal) noexcept override { channel_->refuse(refusal); }
  void abandon(std::string_view reason) noexcept override { channel_->abandon(reason); }
  void end_with(const Error& error) noexcept override { channel_->end_with(error); }
  void leave(std::string_view failure) noexcept override { channel_->leave(failure); }

 private:
  std::unique_ptr<Memory> make_memory(const Call& call) {
    try {
      // Otherwise the system would overcommit and then kill processes to free memory.
      if (call.count > base::available_memory()) throw std::bad_alloc();
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

  /// Exchanges every rank's header and payload, into payloads_. Throws if headers disagree.
  void compare(const Call& call, const Header& mine, std::span<const std::byte> payload,
               Limit& limit);
  /// The same, of what the eager messages have been given.
  void exchange_eager(const Call& call, const Header& mine, Limit& limit);
  void fail_mismatch(const Call& call);
  /// Whether the data of the call is in the eager messages, and no other messages follow.
  bool is_eager(const Call& call) const;
  void perform_eagerly(const Call& call, Limit& limit);
  void complete_eager(const Call& call);
  /// Compares send and recv of two ranks, whose source lines differ. True: the data was eager.
  bool compare_pair(const Call& call, Limit& limit);
  bool is(int r) const { return r == rank(); }

  std::string name_;
  std::unique_ptr<MessageChannel> channel_;
  const int rank_ = channel_->rank();
  const int size_ = channel_->size();
  HeaderMaker headers_;
  // Null: every pair of ranks exchanges messages directly.
  const std::unique_ptr<Rounds> rounds_ =
      channel_->has_rounds() ? std::make_unique<Rounds>(*channel_) : nullptr;
  std::optional<EagerMessages> eager_;  // with rounds_: to report a mismatch only
  std::vector<const void*> payloads_;   // by rank
  const Costs costs_;
  Collectives collectives_{*channel_, rounds_.get(), costs_};
};

MessageEngine::MessageEngine(std::string name, std::unique_ptr<MessageChannel> channel,
                             const Costs& costs)
    : name_(std::move(name)), channel_(std::move(channel)), costs_(costs) {
  if (!rounds_) eager_.emplace(*channel_);
  for (int r = 0; r < size(); ++r) {
    payloads_.push_back(rounds_ ? rounds_->payload(r) : eager_->payload(r));
  }
}

void MessageEngine::compare(const Call& call, const Header& mine,
                            std::span<const std::byte> payload, Limit& limit) {
  if (rounds_) {
    if (rounds_->compare(mine, payload, call, limit)) return;
    eager_.emplace(*channel_);
    payload = {};
  }
  eager_->send_to_all(mine, payload);
  exchange_eager(call, mine, limit);
}

void MessageEngine::exchange_eager(const Call& call, const Header& mine, Limit& limit) {
  eager_->exchange(call, limit);
  const bool compares_sites = call.check == Check::full;
  for (int r = 0; r < size(); ++r) {
    if (!same_signature(mine, eager_->header(r), compares_sites)) return fail_mismatch(call);
  }
}

void MessageEngine::fail_mismatch(const Call& call) {
  std::vector<Row> rows;
  for (int r = 0; r < size(); ++r) rows.push_back({r, eager_->header(r)});
  channel_->fail(mismatch_failure(call, rows, channel_->refused_calls(rows, call)), call);
}

bool MessageEngine::is_eager(const Call& call) const {
  constexpr auto kEager = Collectives::Data::with_headers;
  // The same value on all ranks.
  const std::size_t count =
      call.counts.empty() ? call.count : *std::ranges::max_element(call.counts);
  const std::size_t n_bytes = count * size_of(call.dtype);
  switch (call.op) {
    case Op::barrier: return true;
    case Op::all_reduce:
      if (!rounds_ && !collectives_.is_sent_flat(n_bytes, kEager)) return false;
      break;
    case Op::all_gather:
    case Op::gather: break;
    case Op::broadcast:
    case Op::reduce:
      if (collectives_.is_sent_in_slices(n_bytes, kEager)) return false;
      break;
    case Op::scatter:
    case Op::reduce_scatter:
    case Op::all_to_all:
      if (rounds_) return false;
      break;
    case Op::send:
    case Op::recv:
    case Op::split:
    case Op::allocate: return false;
  }
  return n_bytes <= (rounds_ ? rounds_->payload_bytes() : eager_->payload_bytes());
}

void MessageEngine::perform_eagerly(const Call& call, Limit& limit) {
  const Header mine = headers_.of(call);
  const std::size_t count =
      call.counts.empty() ? call.count : call.counts[static_cast<std::size_t>(rank())];
  const std::size_t n_bytes = call.op == Op::barrier ? 0 : count * size_of(call.dtype);
  const auto own = [&] { return std::span<const std::byte>(bytes(call.in), n_bytes); };
  if (rounds_) {
    compare(call, mine, own(), limit);
    return complete_eager(call);
  }
  switch (call.op) {
    case Op::all_reduce:
    case Op::all_gather: eager_->send_to_all(mine, own()); break;
    case Op::broadcast:
      eager_->send_to_all(mine, is(call.root) ? own() : std::span<const std::byte>());
      break;
    case Op::reduce:
    case Op::gather: eager_->send_to(call.root, mine, own()); break;
    case Op::scatter:
      if (!is(call.root)) {
        eager_->send_to_all(mine, {});
        break;
      }
      [[fallthrough]];
    case Op::reduce_scatter:
    case Op::all_to_all: eager_->send_parts(mine, bytes(call.in), n_bytes); break;
    case Op::barrier:
    case Op::send:
    case Op::recv:
    case Op::split:
    case Op::allocate: eager_->send_to_all(mine, {}); break;
  }
  exchange_eager(call, mine, limit);
  complete_eager(call);
}

void MessageEngine::complete_eager(const Call& call) {
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  const auto payload = [this](int r) { return payloads_[static_cast<std::size_t>(r)]; };
  switch (call.op) {
    case Op::broadcast:
    case Op::scatter: return copy_bytes(call.out, payload(call.root), n_bytes);
    case Op::reduce:
      if (!is(call.root)) return;
      [[fallthrough]];
    case Op::all_reduce:
    case Op::reduce_scatter:
      if (call.count == 0) return;
      return kernels::reduce(call.dtype, call.reduce, payloads_.data(), size(), call.out,
                             call.count);
    case Op::gather:
      if (!is(call.root)) return;
      [[fallthrough]];
    case Op::all_gather:
    case Op::all_to_all: break;
    case Op::barrier:
    case Op::send:
    case Op::recv:
    case Op::split:
    case Op::allocate: return;
  }
  std::size_t at = 0;
  for (int r = 0; r < size(); ++r) {
    const std::size_t part = call.counts.empty()
                                 ? n_bytes
                                 : call.counts[static_cast<std::size_t>(r)] * size_of(call.dtype);
    copy_bytes(bytes(call.out) + at, payload(r), part);
    at += part;
  }
}

bool MessageEngine::compare_pair(const Call& call, Limit& limit) {
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  const Header mine = headers_.of(call);
  const bool eager = n_bytes <= (rounds_ ? sizeof(EagerMessage::payload) : eager_->payload_bytes());
  const std::span payload(bytes(call.in), eager && call.op == Op::send ? n_bytes : 0);
  Header header{};  // of the peer
  const std::byte* data = nullptr;
  if (!rounds_) {
    if (eager_->exchange_with(call.root, mine, payload, header, call, limit)) {
      header = eager_->header(call.root);
    }
    data = eager_->payload(call.root);
  } else {
    EagerMessage first{mine, {}};
    copy_bytes(first.payload.data(), payload.data(), payload.size());
    const std::span<std::byte> received = rounds_->eager_message();
    const std::array<Message, 2> messages = {
        Message{Direction::send, call.root, &first, sizeof(first)},
        Message{Direction::receive, call.root, received.data(), received.size()}};
    if (channel_->exchange_with(call.root, messages, header, call, limit)) {
      std::memcpy(&header, received.data(), sizeof(header));
    }
    data = received.data() + sizeof(header);
  }
  const Op wanted = call.op == Op::send ? Op::recv : Op::send;
  if (static_cast<Op>(header.step) != wanted || header.root != rank() ||
      header.dtype != mine.dtype || header.count != mine.count ||
      header.n_refused != mine.n_refused) {
    std::array<Row, 2> rows{Row{rank(), mine}, Row{call.root, header}};
    if (rows[0].rank > rows[1].rank) std::swap(rows[0], rows[1]);
    channel_->fail(mismatch_failure(call, rows, channel_->refused_calls(rows, call)), call);
  }
  if (eager && call.op == Op::recv) copy_bytes(call.out, data, n_bytes);
  return eager;
}

void MessageEngine::run(const Call& call) {
  channel_->begin(call);
  Limit limit(call.timeout);
  const bool is_pair = internal::is_pair(call.op);
  // A barrier consists of this message only.
  if (call.check != Check::off || call.op == Op::barrier) {
    if (is_pair) {
      if (compare_pair(call, limit)) return;
    } else if (is_eager(call)) {
      return perform_eagerly(call, limit);
    } else {
      compare(call, headers_.of(call), {}, limit);
    }
  }
  collectives_.run(call, limit);
}

std::unique_ptr<Engine> MessageEngine::split(const Call& call, int color, int key) {
  channel_->begin(call);
  Limit limit(call.timeout);
  struct Choice {
    int color;
    int key;
    std::int64_t number;  // of the part's channel, if this rank is its first
  };
  static_assert(sizeof(Choice) <= Rounds::kMinPayloadBytes);
  const Choice mine{color, key, channel_->next_number()};
  compare(call, headers_.of(call, color, key), std::as_bytes(std::span(&mine, 1)), limit);
  std::vector<Choice> choices(payloads_.size());
  for (std::size_t r = 0; r < choices.size(); ++r) {
    std::memcpy(&choices[r], payloads_[r], sizeof(Choice));
  }
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    if (choices[static_cast<std::size_t>(r)].color == color) members.push_back(r);
  }
  std::ranges::stable_sort(members, {},
                           [&](int r) { return choices[static_cast<std::size_t>(r)].key; });
  const std::int64_t number = choices[static_cast<std::size_t>(members.front())].number;
  return std::make_unique<MessageEngine>(name_, channel_->split(members, number, call), costs_);
}

}  // namespace

std::unique_ptr<Engine> make(std::string name, std::unique_ptr<Transport> transport,
                             const Costs& costs) {
  return std::make_unique<MessageEngine>(
      std::move(name), std::make_unique<MessageChannel>(std::move(transport)), costs);
}

}  // namespace lockstep::message
