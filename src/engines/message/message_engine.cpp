#include "engines/message/message_engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <iterator>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "comm/call_word.hpp"
#include "comm/check.hpp"
#include "kernels/reduce.hpp"

namespace lockstep::message {
namespace {

using comm::has_reduction;
using comm::has_root;
using comm::moves_data;
using Way = Message::Way;

/// Up to here every rank sends all it has to all, which is one exchange; above, each reduces a
/// slice, which is two.
constexpr std::size_t kFlatBytes = 16 << 10;
/// The root of a reduce holds this much of each rank at a time.
constexpr std::size_t kChunkBytes = 16 << 20;

/// What ranks compare before they take any data.
struct Header {
  std::uint8_t op;
  std::uint8_t step;  // the operation that it makes here
  std::uint8_t dtype;
  std::uint8_t reduce;
  std::int32_t root;
  std::uint64_t count;
  std::uint64_t counts;  // a hash of all_gather's and gather's
  std::int32_t color;    // of split
  std::int32_t key;
  std::uint32_t line;
  comm::Check check;          // how much this rank compares
  std::array<char, 27> file;  // its name's end, and a null
};
static_assert(sizeof(Header) == 64);
static_assert(std::is_trivially_copyable_v<Header>);

/// The first message of a call. Its length is the same whatever the call, so that ranks that make
/// different calls can read each other; data that fits rides in it, and no other message follows.
struct alignas(64) First {
  Header header;
  std::array<std::byte, 64> payload;
};
static_assert(sizeof(First) == 128);

std::string_view file_of(const Header& header) {
  // A peer sent it: it may lack its end.
  return base::text_in(header.file);
}

bool agree(const Header& a, const Header& b, bool compares_sites) {
  const auto op = static_cast<Op>(a.op);
  if (a.op != b.op || a.step != b.step || a.check != b.check) return false;
  if (compares_sites && (a.line != b.line || a.file != b.file)) return false;
  if (moves_data(op) && (a.dtype != b.dtype || a.count != b.count || a.counts != b.counts)) {
    return false;
  }
  return (!has_root(op) || a.root == b.root) && (!has_reduction(op) || a.reduce == b.reduce);
}

struct Row {
  int rank;
  Header header;
};

std::string difference_of(std::span<const Row> rows) {
  const auto check_of = [](const Row& row) { return row.header.check; };
  if (std::ranges::adjacent_find(rows, std::not_equal_to(), check_of) != rows.end()) {
    std::string text = "LOCKSTEP_CHECK must be the same on all ranks, but it is";
    for (const Row& row : rows) {
      fmt::format_to(std::back_inserter(text), "{}{} on rank {}",
                     row.rank == rows.front().rank ? " " : ", ", comm::name_of(row.header.check),
                     row.rank);
    }
    return text;
  }
  std::string table =
      "the ranks made different calls; all ranks must call the same, in the same order\n"
      "  rank  operation       type  count       root  reduction  where";
  for (const auto& [rank, header] : rows) {
    const auto op = static_cast<Op>(header.op);
    fmt::format_to(std::back_inserter(table),
                   "\n  {:<4}  {:<14}  {:<4}  {:<10}  {:<4}  {:<9}  {}:{}", rank, name_of(op),
                   moves_data(op) ? name_of(static_cast<DType>(header.dtype)) : "-",
                   !moves_data(op)      ? "-"
                   : header.counts != 0 ? fmt::format("by rank {:04x}", header.counts & 0xffffU)
                                        : std::to_string(header.count),
                   has_root(op) ? std::to_string(header.root) : "-",
                   has_reduction(op) ? name_of(static_cast<ReduceOp>(header.reduce)) : "-",
                   file_of(header), header.line);
  }
  return table;
}

class Memory final : public SharedMemory {
 public:
  explicit Memory(std::size_t n_bytes) : bytes_(n_bytes) {}
  std::byte* data() const noexcept override { return bytes_.data(); }

 private:
  mutable std::vector<std::byte> bytes_;
};

/// Every operation as messages between the ranks: first headers, which are compared, with the data
/// that fits beside them; then the rest. Where LOCKSTEP_CHECK is off, data only. Reductions are
/// this engine's own: in rank order, of every type, the same bits on all ranks.
class MessageEngine final : public Engine {
 public:
  MessageEngine(std::string name, std::unique_ptr<Channel> channel)
      : name_(std::move(name)), channel_(std::move(channel)) {}

  std::string_view name() const noexcept override { return name_; }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  void run(const Call& call) override;
  std::unique_ptr<Engine> split(const Call& call, int color, int key) override;
  std::unique_ptr<SharedMemory> allocate(const Call& call) override {
    Limit limit(call);
    compare(call, header_of(call), {}, limit);
    return std::make_unique<Memory>(call.count);
  }
  void abandon(std::string_view reason) noexcept override { channel_->abandon(reason); }
  void leave(std::string_view failure) noexcept override { channel_->leave(failure); }

 private:
  /// One call's step: messages, and the call they belong to.
  struct Step {
    Channel& channel;
    const Call& call;
    Limit& limit;
    std::vector<Message>& messages;  // empty between steps: its room is kept

    void send(int peer, const void* data, std::size_t n_bytes) {
      if (peer == channel.rank()) return;
      messages.push_back({Way::send, peer, const_cast<void*>(data), n_bytes});
    }
    void receive(int peer, void* data, std::size_t n_bytes) {
      if (peer == channel.rank()) return;
      messages.push_back({Way::receive, peer, data, n_bytes});
    }
    void run() {
      channel.exchange(messages, call, limit);
      messages.clear();
    }
  };

  Header header_of(const Call& step, int color = 0, int key = 0);
  /// Everybody's first messages, in firsts_, from this rank's. Throws where they disagree.
  void compare(const Call& call, const Header& mine, std::span<const std::byte> payload,
               Limit& limit);
  /// How many of this rank's bytes ride in the first message; nullopt: none, they follow.
  std::optional<std::size_t> n_riding(const Call& call) const;
  void finish_riding(const Call& call);
  /// The same for the two ranks of send and recv, whose lines differ. True: the data rode along.
  bool compare_pair(const Call& call, Limit& limit);
  void all_reduce(Step step);
  void reduce(Step step);
  void gather(Step step, bool is_for_all);
  void reduce_scatter(Step step);
  void all_to_all(Step step);
  /// out <- reduction of this rank's `own` and of the others' parts in `parts`, of n_bytes each.
  void fold(const Call& call, const std::byte* own, std::byte* parts, std::size_t n_bytes,
            std::byte* out);
  bool is(int r) const { return r == rank(); }

  std::string name_;
  std::unique_ptr<Channel> channel_;
  const int rank_ = channel_->rank();
  const int size_ = channel_->size();
  const char* path_ = nullptr;   // of the last call's file
  std::array<char, 27> file_{};  // the end of its name
  comm::Check check_ = comm::check_level();
  std::vector<First> firsts_;
  std::vector<Message> messages_;
  std::vector<const void*> in_;
  std::vector<std::byte> scratch_;
};

std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }
const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }

/// What stays on its rank; also where it stays in its place.
void keep(void* to, const void* from, std::size_t n_bytes) {
  if (n_bytes > 0 && to != from) std::memmove(to, from, n_bytes);
}

Header MessageEngine::header_of(const Call& step, int color, int key) {
  const Call& call = step.whole != nullptr ? *step.whole : step;
  Header header{};
  header.step = static_cast<std::uint8_t>(step.op);
  header.op = static_cast<std::uint8_t>(call.op);
  header.dtype = static_cast<std::uint8_t>(call.dtype);
  header.reduce = static_cast<std::uint8_t>(call.reduce);
  header.root = call.root;
  // Where parts differ in size, each rank's own count does too.
  header.count = call.counts.empty() ? call.count : 0;
  for (const std::size_t count : call.counts) {
    header.counts = (header.counts ^ count) * 0x9e3779b97f4a7c15U + 1;
  }
  header.check = check_;
  header.color = color;
  header.key = key;
  header.line = call.where.line();
  if (call.where.file_name() != path_) {
    path_ = call.where.file_name();
    std::string_view file = path_;
    file.remove_prefix(file.find_last_of('/') + 1);
    file.remove_prefix(file.size() - std::min(file.size(), file_.size() - 1));
    file_ = {};
    file.copy(file_.data(), file.size());
  }
  header.file = file_;
  return header;
}

void MessageEngine::compare(const Call& call, const Header& mine,
                            std::span<const std::byte> payload, Limit& limit) {
  firsts_.resize(static_cast<std::size_t>(size()));
  First& own = firsts_[static_cast<std::size_t>(rank())];
  own.header = mine;
  keep(own.payload.data(), payload.data(), payload.size());
  Step step{*channel_, call, limit, messages_};
  for (int r = 0; r < size(); ++r) {
    step.send(r, &own, sizeof(First));
    step.receive(r, &firsts_[static_cast<std::size_t>(r)], sizeof(First));
  }
  step.run();
  const bool compares_sites = check_ == comm::Check::full;
  if (std::ranges::all_of(
          firsts_, [&](const First& other) { return agree(mine, other.header, compares_sites); })) {
    return;
  }
  std::vector<Row> rows;
  for (int r = 0; r < size(); ++r) {
    rows.push_back({r, firsts_[static_cast<std::size_t>(r)].header});
  }
  channel_->fail_mismatch(difference_of(rows), call);
}

std::optional<std::size_t> MessageEngine::n_riding(const Call& call) const {
  std::size_t count = call.count, most = count;
  switch (call.op) {
    case Op::all_gather:
    case Op::gather:
      if (!call.counts.empty()) {
        count = call.counts[static_cast<std::size_t>(rank())];
        most = *std::ranges::max_element(call.counts);  // what all ranks know alike
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

void MessageEngine::finish_riding(const Call& call) {
  const std::size_t n_bytes = call.count * size_of(call.dtype);
  const auto payload = [this](int r) {
    return firsts_[static_cast<std::size_t>(r)].payload.data();
  };
  if (call.op == Op::broadcast) {
    keep(call.out, payload(call.root), n_bytes);
  } else if (call.op == Op::all_reduce || (call.op == Op::reduce && is(call.root))) {
    in_.clear();
    for (int r = 0; r < size(); ++r) in_.push_back(payload(r));
    if (call.count > 0) {
      kernels::reduce(call.dtype, call.reduce, in_.data(), size(), call.out, call.count);
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
  const bool rides = n_bytes <= sizeof(First::payload);
  First mine{header_of(call), {}};
  First other{};
  if (rides && call.op == Op::send) keep(mine.payload.data(), call.in, n_bytes);
  Step step{*channel_, call, limit, messages_};
  step.send(call.root, &mine, sizeof(mine));
  step.receive(call.root, &other, sizeof(other));
  step.run();
  const Op wanted = call.op == Op::send ? Op::recv : Op::send;
  const Header& header = other.header;
  if (static_cast<Op>(header.step) != wanted || header.root != rank() ||
      header.dtype != mine.header.dtype || header.count != mine.header.count) {
    std::array<Row, 2> rows{Row{rank(), mine.header}, Row{call.root, header}};
    if (rows[0].rank > rows[1].rank) std::swap(rows[0], rows[1]);
    channel_->fail_mismatch(difference_of(rows), call);
  }
  if (rides && call.op == Op::recv) keep(call.out, other.payload.data(), n_bytes);
  return rides;
}

void MessageEngine::run(const Call& call) {
  Limit limit(call);
  Step step{*channel_, call, limit, messages_};
  const bool is_pair = call.op == Op::send || call.op == Op::recv;
  // A barrier is nothing but this message.
  if (check_ != comm::Check::off || call.op == Op::barrier) {
    if (is_pair) {
      if (compare_pair(call, limit)) return;
    } else if (const auto n = n_riding(call)) {
      compare(call, header_of(call), {bytes(call.in), *n}, limit);
      return finish_riding(call);
    } else {
      compare(call, header_of(call), {}, limit);
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

void MessageEngine::fold(const Call& call, const std::byte* own, std::byte* parts,
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
    fold(call, data, scratch_.data(), n_bytes, data);
    return;
  }
  const auto start = [&](std::size_t r) { return call.count * r / n * element; };
  const auto me = static_cast<std::size_t>(rank());
  const std::size_t mine = start(me + 1) - start(me);
  scratch_.resize(n * mine);
  for (std::size_t r = 0; r < n; ++r) {
    step.send(static_cast<int>(r), data + start(r), start(r + 1) - start(r));
    step.receive(static_cast<int>(r), scratch_.data() + r * mine, mine);
  }
  step.run();
  fold(call, data + start(me), scratch_.data(), mine, data + start(me));
  for (std::size_t r = 0; r < n; ++r) {
    step.send(static_cast<int>(r), data + start(me), mine);
    step.receive(static_cast<int>(r), data + start(r), start(r + 1) - start(r));
  }
  step.run();
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
    fold(call, bytes(call.out) + at, scratch_.data(), now, bytes(call.out) + at);
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
  fold(call, bytes(call.in) + static_cast<std::size_t>(rank()) * n_bytes, scratch_.data(), n_bytes,
       bytes(call.out));
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
  Limit limit(call);
  compare(call, header_of(call, color, key), {}, limit);
  const auto said = [this](int r) { return firsts_[static_cast<std::size_t>(r)].header; };
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    if (said(r).color == color) members.push_back(r);
  }
  std::ranges::stable_sort(members, {}, [&](int r) { return said(r).key; });
  return std::make_unique<MessageEngine>(name_, channel_->split(members, call, limit));
}

}  // namespace

std::unique_ptr<Engine> make(std::string name, std::unique_ptr<Channel> channel) {
  return std::make_unique<MessageEngine>(std::move(name), std::move(channel));
}

}  // namespace lockstep::message
