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

#include "base/bytes.hpp"
#include "base/memory.hpp"
#include "engines/hierarchical/hierarchical.hpp"
#include "engines/hierarchical/levels.hpp"
#include "engines/message/eager_messages.hpp"
#include "engines/message/header.hpp"
#include "engines/message/message_channel.hpp"
#include "engines/message/message_collectives.hpp"
#include "engines/message/subset.hpp"
#include "group/check.hpp"
#include "group/native_engine.hpp"
#include "group/step.hpp"
#include "kernels/reduce.hpp"
#include "record/progress.hpp"
#include "record/signature.hpp"

namespace lockstep::message {
namespace {

using base::bytes;
using base::copy_bytes;

/// In more than Transport::kMaxDirect ranks, calls go through levels if a message from rank to rank
/// would have at most this: then the time of N - 1 messages is longer than that of the same bytes
/// on each level. By the model of docs/scaling.md the same takes 275 B between 16 hosts, 600 B
/// between 64, 415 B between 256 and 315 B between 1,024, at 25 Gbit/s.
constexpr std::size_t kMostInLevels = 512;

class Memory final : public SharedMemory {
 public:
  explicit Memory(std::size_t n_bytes) : bytes_(n_bytes) {}
  std::byte* data() const noexcept override { return bytes_.data(); }

 private:
  mutable std::vector<std::byte> bytes_;
};

/// Every operation as messages between the ranks of a part of a channel, or of all of it: first
/// headers, which are compared, with eager data; then the remaining data. If LOCKSTEP_CHECK is off,
/// data only; barrier, split and allocate compare headers even then. This engine reduces itself: in
/// the order of the tree over ranks, for every type, with the same bits on all ranks.
///
/// More than Transport::kMaxDirect ranks are levels if their transport answers status queries:
/// parts of that many consecutive ranks, which are nodes of the tree, and the first ranks of these
/// parts, which may again be levels. All levels use the same channel. The messages between two
/// ranks have the same order on both, because both make the same calls, which consist of the same
/// steps. Ranks of different parts whose calls differ exchange no messages before their leaders
/// have compared them, and long data is sent from each to each only then.
class MessageEngine final : public internal::NativeEngine {
 public:
  MessageEngine(std::string name, std::unique_ptr<MessageChannel> channel);

  std::string_view name() const noexcept override { return name_; }
  int rank() const noexcept override { return subset_.rank; }
  int size() const noexcept override { return subset_.size; }
  bool reports_progress() const noexcept override { return true; }
  bool reduces_moments() const noexcept override { return true; }
  std::string_view why_one_thread() const noexcept override { return channel_->why_one_thread(); }
  void run(const Call& call) override;
  std::unique_ptr<Engine> split(const Call& call, int color, int key) override;
  std::unique_ptr<SharedMemory> allocate(const Call& call) override;
  std::vector<std::unique_ptr<Engine>> divide(const Call& call,
                                              std::span<const int> counts) override {
    return hierarchical::divide(*this, call, counts);
  }
  void refuse(const Refusal& refusal) noexcept override { channel_->refuse(refusal); }
  void abandon(std::string_view reason) noexcept override { channel_->abandon(reason); }
  void end_with(const Error& error) noexcept override { channel_->end_with(error); }
  void leave(std::string_view failure) noexcept override { channel_->leave(failure); }

 private:
  enum class Spread { levels, direct };
  /// Of some ranks of the channel of `whole`, for the steps of its calls.
  MessageEngine(const MessageEngine& whole, const Subset& subset, Spread spread);
  void make_levels();
  std::unique_ptr<MessageEngine> step_engine(const Subset& subset, Spread spread = Spread::levels) {
    return std::unique_ptr<MessageEngine>(new MessageEngine(*this, subset, spread));
  }

  std::unique_ptr<Memory> make_memory(const Call& call) {
    try {
      // Otherwise the system would overcommit and then kill processes to free memory.
      if (call.count > base::available_memory()) throw std::bad_alloc();
      return std::make_unique<Memory>(call.count);
    } catch (const std::bad_alloc&) {
      const SystemError error(
          context_of(call, channel_->rank()), ENOMEM,
          fmt::format("cannot allocate a buffer of {} bytes; free memory, or raise the limits "
                      "(ulimit -v, the container's memory)",
                      call.count));
      channel_->end_with(error);
      throw SystemError(error);
    }
  }

  /// A call, or a step of one.
  void perform(const Call& call);
  /// Exchanges the headers of every two ranks. Throws if they disagree.
  void compare(const Call& call, Limit& limit);
  /// The same, with what the eager messages have been given.
  void exchange_eager(const Call& call, const Header& mine, Limit& limit);
  void fail_mismatch(const Call& call);
  /// Whether the data of the call is in the eager messages, and no other messages follow.
  bool is_eager(const Call& call);
  void perform_eagerly(const Call& call, Limit& limit);
  void complete_eager(const Call& call);
  /// Compares send and recv of two ranks, whose source lines differ. True: the data was eager.
  bool compare_pair(const Call& call, Limit& limit);
  EagerMessages& eager();
  bool is(int r) const { return r == rank(); }

  std::string name_;
  const std::shared_ptr<MessageChannel> channel_;
  const Subset subset_;
  const bool is_whole_;  ///< of a group, whose calls the channel counts
  HeaderMaker headers_;
  std::optional<EagerMessages> eager_;
  std::vector<const void*> payloads_;  // of eager_, by rank
  Collectives collectives_{*channel_, subset_};
  std::optional<hierarchical::Levels> levels_;
};

MessageEngine::MessageEngine(std::string name, std::unique_ptr<MessageChannel> channel)
    : name_(std::move(name)),
      channel_(std::move(channel)),
      subset_{.first = 0, .stride = 1, .size = channel_->size(), .rank = channel_->rank()},
      is_whole_(true) {
  if (channel_->has_levels()) {
    make_levels();
  } else {
    eager();
  }
}

MessageEngine::MessageEngine(const MessageEngine& whole, const Subset& subset, Spread spread)
    : name_(whole.name_), channel_(whole.channel_), subset_(subset), is_whole_(false) {
  if (spread == Spread::levels && size() > Transport::kMaxDirect) make_levels();
}

void MessageEngine::make_levels() {
  constexpr int kMost = Transport::kMaxDirect;
  const int leader = rank() / kMost * kMost;
  std::vector<int> leaders;  // by rank
  for (int r = 0; r < size(); ++r) leaders.push_back(r / kMost * kMost);
  auto global = step_engine(subset_, Spread::direct);
  auto local = step_engine({.first = subset_.number_of(leader),
                            .stride = subset_.stride,
                            .size = std::min(kMost, size() - leader),
                            .rank = rank() - leader});
  auto between = is(leader) ? step_engine({.first = subset_.first,
                                           .stride = subset_.stride * kMost,
                                           .size = (size() + kMost - 1) / kMost,
                                           .rank = rank() / kMost})
                            : nullptr;
  levels_.emplace(hierarchical::Levels{.global = std::move(global),
                                       .local = std::move(local),
                                       .leaders = std::move(between),
                                       .topology = {std::move(leaders), rank()},
                                       .are_one_channel = true,
                                       .most_bytes = kMostInLevels});
}

EagerMessages& MessageEngine::eager() {
  if (!eager_) {
    eager_.emplace(*channel_, subset_);
    for (int r = 0; r < size(); ++r) payloads_.push_back(eager_->payload(r));
  }
  return *eager_;
}

void MessageEngine::compare(const Call& call, Limit& limit) {
  const Header mine = headers_.of(call);
  eager().send_to_all(mine, {});
  exchange_eager(call, mine, limit);
}

void MessageEngine::exchange_eager(const Call& call, const Header& mine, Limit& limit) {
  eager_->exchange(call, limit);
  const bool compares_sites = call.check == Check::full;
  for (int r = 0; r < size(); ++r) {
    if (!same_signature(mine, eager_->header(r), compares_sites)) return fail_mismatch(call);
  }
}

/// A leader stands for the ranks of its part, which have agreed.
void MessageEngine::fail_mismatch(const Call& call) {
  std::vector<Row> rows;
  for (int r = 0; r < size(); ++r) {
    const int end = std::min(subset_.number_of(r + 1), channel_->size());
    for (int number = subset_.number_of(r); number < end; ++number) {
      rows.push_back({number, eager_->header(r)});
    }
  }
  channel_->fail(mismatch_failure(call, rows, channel_->refused_calls(rows)), call);
}

bool MessageEngine::is_eager(const Call& call) {
  // The same value on all ranks.
  const std::size_t count =
      call.counts.empty() ? call.count : *std::ranges::max_element(call.counts);
  const std::size_t n_bytes = count * size_of(call.dtype);
  switch (call.op) {
    case Op::barrier: return true;
    case Op::all_reduce:
      if (!collectives_.is_sent_flat(n_bytes)) return false;
      break;
    case Op::broadcast:
    case Op::reduce:
      if (collectives_.is_sent_in_slices(n_bytes)) return false;
      break;
    case Op::all_gather:
    case Op::gather:
    case Op::scatter:
    case Op::reduce_scatter:
    case Op::all_to_all: break;
    case Op::send:
    case Op::recv:
    case Op::split:
    case Op::allocate: return false;
  }
  return n_bytes <= eager().payload_bytes();
}

void MessageEngine::perform_eagerly(const Call& call, Limit& limit) {
  const Header mine = headers_.of(call);
  const std::size_t count =
      call.counts.empty() ? call.count : call.counts[static_cast<std::size_t>(rank())];
  const std::size_t n_bytes = call.op == Op::barrier ? 0 : count * size_of(call.dtype);
  const auto own = [&] { return std::span<const std::byte>(bytes(call.in), n_bytes); };
  eager();
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
  const bool is_eager = n_bytes <= eager().payload_bytes();
  const std::span payload(bytes(call.in), is_eager && call.op == Op::send ? n_bytes : 0);
  Header header{};  // of the peer
  if (eager_->exchange_with(call.root, mine, payload, header, call, limit)) {
    header = eager_->header(call.root);
  }
  const Op wanted = call.op == Op::send ? Op::recv : Op::send;
  if (static_cast<Op>(header.step) != wanted || header.root != rank() ||
      header.dtype != mine.dtype || header.count != mine.count) {
    std::array<Row, 2> rows{Row{rank(), mine}, Row{call.root, header}};
    if (rows[0].rank > rows[1].rank) std::swap(rows[0], rows[1]);
    channel_->fail(mismatch_failure(call, rows, channel_->refused_calls(rows)), call);
  }
  if (is_eager && call.op == Op::recv) {
    copy_bytes(call.out, eager_->payload(call.root), n_bytes);
  }
  return is_eager;
}

void MessageEngine::run(const Call& call) {
  if (is_whole_) channel_->begin(call);
  perform(call);
}

void MessageEngine::perform(const Call& call) {
  const bool is_pair = internal::is_pair(call.op);
  if (levels_ && !is_pair) {
    if (call.progress != nullptr) call.progress->arrived(call);  // steps would report themselves
    levels_->begin(call);
    return run_over_hosts(*levels_, call);
  }
  Limit limit(call.timeout);
  // A barrier consists of this message only.
  if (call.check != Check::off || call.op == Op::barrier) {
    if (is_pair) {
      if (compare_pair(call, limit)) return;
    } else if (is_eager(call)) {
      return perform_eagerly(call, limit);
    } else {
      compare(call, limit);
    }
  }
  collectives_.run(call, limit);
}

std::unique_ptr<SharedMemory> MessageEngine::allocate(const Call& call) {
  channel_->begin(call);
  auto memory = make_memory(call);  // first: all ranks get their buffer or none does
  perform(internal::barrier_of(call));
  return memory;
}

std::unique_ptr<Engine> MessageEngine::split(const Call& call, int color, int key) {
  channel_->begin(call);
  struct Choice {
    int color;
    int key;
    std::int64_t number;  // of the part's channel, if this rank is its first
  };
  const std::size_t n_bytes = channel_->address_bytes();
  std::vector<std::byte> mine(sizeof(Choice));
  const Choice own{color, key, channel_->next_number()};
  copy_bytes(mine.data(), &own, sizeof own);
  const std::vector<std::byte> address = channel_->open_part(call);
  mine.insert(mine.end(), address.begin(), address.end());
  std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(size()));
  Call gather = internal::step_of(call, Op::all_gather, /*root=*/-1);
  gather.check = Check::light;  // even if other calls are not compared
  gather.dtype = DType::u8;
  gather.count = mine.size();
  gather.in = mine.data();
  gather.out = all.data();
  perform(gather);
  std::vector<Choice> choices(static_cast<std::size_t>(size()));
  const auto of_rank = [&](int r) {
    return all.data() + mine.size() * static_cast<std::size_t>(r);
  };
  for (int r = 0; r < size(); ++r) {
    copy_bytes(&choices[static_cast<std::size_t>(r)], of_rank(r), sizeof(Choice));
  }
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    if (choices[static_cast<std::size_t>(r)].color == color) members.push_back(r);
  }
  std::ranges::stable_sort(members, {},
                           [&](int r) { return choices[static_cast<std::size_t>(r)].key; });
  std::vector<std::byte> addresses;
  for (const int r : members) {
    addresses.insert(addresses.end(), of_rank(r) + sizeof(Choice),
                     of_rank(r) + sizeof(Choice) + n_bytes);
  }
  const std::int64_t number = choices[static_cast<std::size_t>(members.front())].number;
  return std::make_unique<MessageEngine>(name_, channel_->split(members, number, call, addresses));
}

}  // namespace

std::unique_ptr<Engine> make(std::string name, std::unique_ptr<Transport> transport) {
  return std::make_unique<MessageEngine>(std::move(name),
                                         std::make_unique<MessageChannel>(std::move(transport)));
}

}  // namespace lockstep::message
