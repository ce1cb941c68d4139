#include "engines/message/message_channel.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <lockstep/error.hpp>
#include <map>
#include <mutex>
#include <new>
#include <numeric>
#include <thread>
#include <utility>

#include "group/wait_chain.hpp"
#include "record/progress.hpp"
#include "record/signature.hpp"

namespace lockstep::message {
namespace {

using Clock = std::chrono::steady_clock;
using internal::Failure;
using Kind = Failure::Kind;
using State = Transport::State;
using std::chrono::milliseconds;

/// How long messages that a rank sent before it left may still be in transit.
constexpr milliseconds kTransitTime{500};
/// If a connection broke, the control message with the reason may still be arriving.
constexpr milliseconds kControlDelay{200};
/// How long a rank that runs takes at most to answer a question. A rank that is late is named that
/// much after the call's time.
constexpr milliseconds kAnswerTime{250};
/// How long a rank waits for its peer in a send or recv before it asks whether that can end.
constexpr milliseconds kQuestionDelay{200};

}  // namespace

/// What the control messages of a channel said. Threads: any.
struct Channel::Control {
  explicit Control(std::unique_ptr<Transport> channel) : transport(std::move(channel)) {}

  void poll() {
    const std::lock_guard lock(mutex);
    while (auto message = transport->poll_control()) {
      switch (message->kind) {
        case ControlMessage::Kind::failure:
          if (!failure) failure = std::move(message->failure);
          break;
        case ControlMessage::Kind::departure:
          departures.emplace(message->failure.culprit, std::move(message->failure));
          break;
        case ControlMessage::Kind::question: questions.push_back(message->position); break;
        case ControlMessage::Kind::refusal:
          refusals.push_back({message->position, std::move(message->failure.text)});
          break;
        case ControlMessage::Kind::position:
          answers.insert_or_assign(message->position.rank, message->position);
          break;
      }
    }
    // Of an exchange that this rank has not begun: the answer is given then, and before once if
    // this rank waits in an earlier one.
    std::erase_if(questions, [this](Position& question) {
      const bool has_begun = position.number >= question.number;
      const bool waits = position.awaited != Position::kNone;
      if (has_begun || (waits && question.awaited == Position::kNone)) {
        transport->send_control({.kind = ControlMessage::Kind::position, .position = position},
                                question.rank);
        question.awaited = position.awaited;
      }
      return has_begun;
    });
  }

  const std::unique_ptr<Transport> transport;
  std::mutex mutex;                // guards the following
  bool has_left = false;           // of the world's channel: this rank has left the world
  std::optional<Failure> failure;  // the first: why the channel is dead
  std::map<int, Failure> departures;
  Position position{.rank = transport->rank()};  // written by the thread of the current call
  std::vector<Position> questions;
  std::map<int, Position> answers;
  std::int64_t n_numbers = 0;  // of the world's channel: numbers that this rank got for others
  struct Refused {
    Position of;  // rank, number: the calls before it; header: op, root: the peer, n_refused
    std::string text;
  };
  std::vector<Refused> refusals;  // in order, by rank
};

/// Whether an exchange with one peer can ever complete.
struct Channel::Question {
  int peer;
  Header& header;  // of the call in which the peer waits
  Clock::time_point time = Clock::now() + kQuestionDelay;
  bool is_asked = false;
  bool is_answered = false;
};

Channel::Channel(std::unique_ptr<Transport> transport)
    : control_(std::make_shared<Control>(std::move(transport))),
      world_(control_),
      transport_(*control_->transport),
      members_(static_cast<std::size_t>(transport_.size())) {
  std::iota(members_.begin(), members_.end(), 0);
}

Channel::Channel(std::unique_ptr<Transport> transport, std::vector<int> members,
                 std::shared_ptr<Control> world)
    : control_(std::make_shared<Control>(std::move(transport))),
      world_(std::move(world)),
      transport_(*control_->transport),
      members_(std::move(members)) {}

void Channel::exchange(std::span<const Message> messages, const Call& call, Limit& limit) {
  perform(messages, call, limit, nullptr);
}

bool Channel::exchange_with(int peer, std::span<const Message> messages, Header& header,
                            const Call& call, Limit& limit) {
  if (!has_rounds_) return perform(messages, call, limit, nullptr);
  Question question{.peer = peer, .header = header};
  return perform(messages, call, limit, &question);
}

void Channel::begin_rounds(const Header& header) {
  const std::lock_guard lock(control_->mutex);
  ++control_->position.number;
  control_->position.awaited = rank();  // it does not wait yet
  control_->position.n_known = 1;
  control_->position.header = header;
  is_in_rounds_ = true;
}

void Channel::round(std::span<const Message> messages, int awaited, int n_known, const Call& call,
                    Limit& limit) {
  set_position(awaited, n_known);
  perform(messages, call, limit, nullptr);
}

void Channel::end_rounds() {
  set_position(Position::kNone, size());
  is_in_rounds_ = false;
}

/// In what order a rank exchanges messages with the others: both ranks of a message give it the
/// same place, no two messages to a rank, or from one, have the same, and neighbours by rank come
/// first. Blocks of B ranks, the largest power of two that divides N, are passed in a ring, and
/// within a pair of blocks rank i exchanges with i XOR 0, 1, ... B - 1. In aligned blocks, the
/// messages of a window so cross equally many switches and end together.
int Channel::place_in_windows(const Message& message) const {
  const int shift = std::countr_zero(static_cast<unsigned>(size()));  // B is 1 << shift
  const bool is_sent = message.way == Message::Way::send;
  const int from = is_sent ? rank() : message.peer, to = is_sent ? message.peer : rank();
  int n_blocks = (to >> shift) - (from >> shift);
  if (n_blocks < 0) n_blocks += size() >> shift;
  return (n_blocks << shift) + ((from ^ to) & ((1 << shift) - 1));
}

/// A window is complete before the next one begins: its messages wait for ranks in the same or an
/// earlier window only, so the earliest one always ends. If a rank stops, others that wait for it
/// keep further ones from their next window. Those in the earliest window wait for no other rank:
/// by their positions all ranks find who is late.
void Channel::exchange_in_windows(std::span<Message> messages, const Call& call, Limit& limit) {
  const auto window_of = [this](const Message& message) {
    return place_in_windows(message) / kWindow;
  };
  // Messages between two ranks stay in order.
  std::ranges::stable_sort(messages, {},
                           [this](const Message& message) { return place_in_windows(message); });
  for (std::size_t begin = 0, end = 0; begin < messages.size(); begin = end) {
    const int window = window_of(messages[begin]);
    while (end < messages.size() && window_of(messages[end]) == window) ++end;
    perform(messages.subspan(begin, end - begin), call, limit, nullptr);
  }
}

void Channel::set_position(int awaited, int n_known) {
  const std::lock_guard lock(control_->mutex);
  control_->position.awaited = awaited;
  control_->position.n_known = n_known;
}

bool Channel::perform(std::span<const Message> messages, const Call& call, Limit& limit,
                      Question* question) {
  if (const int n_polls = transport_.n_polls_before_exchange(); n_polls > 0) {
    for (int i = 0; i < n_polls; ++i) poll_control();
    throw_if_failed(call);
  }
  struct CancelUnlessComplete {
    Transport& transport;
    bool is_complete = false;
    ~CancelUnlessComplete() {
      if (!is_complete) transport.cancel();
    }
  } exchange{transport_};
  try {
    transport_.start(messages, call);
    if (call.progress != nullptr) call.progress->arrived(call);
    exchange.is_complete = transport_.test() || wait(call, limit, question);
  } catch (const TransportError& error) {
    fail_transport(error, call);
  }
  return exchange.is_complete;
}

bool Channel::wait(const Call& call, Limit& limit, Question* question) {
  if (call.progress != nullptr) call.progress->slept(call);  // polling counts as sleep
  const auto deadline = limit.end();                         // begins now
  std::optional<Clock::time_point> departure_seen;
  // Ranks that wait for this one, also in a later call, must find the rank that it waits for.
  const bool shows_awaited = transport_.answers_questions() && !is_in_rounds_;
  for (;;) {
    const State state = transport_.wait(deadline);
    if (state == State::complete) {
      if (shows_awaited) set_position(Position::kNone, size());
      return true;
    }
    std::vector<int> awaited = transport_.awaited();
    std::ranges::sort(awaited);
    awaited.erase(std::unique(awaited.begin(), awaited.end()), awaited.end());
    // Before a question is answered, which may be what ended the wait.
    if (shows_awaited && !awaited.empty()) set_position(awaited.front(), size());
    poll_control();
    throw_if_failed(call);
    throw_if_refused(call);
    if (question != nullptr && is_impossible(*question)) return false;
    const auto now = Clock::now();
    const bool has_ended = state == State::ended;
    if (const auto departure = departure_among(awaited)) {
      if (!departure_seen) departure_seen = now;
      if (has_ended || now >= deadline || now - *departure_seen >= kTransitTime) {
        fail(*departure, call);
      }
    }
    // None are awaited if the last message has arrived since.
    if ((!has_ended && now < deadline) || awaited.empty()) continue;
    std::optional<internal::WaitChain> cycle;
    if (transport_.answers_questions()) {
      const std::map<int, Position> positions = ask_positions(call);
      if (auto late = find_late(positions, awaited); !late.empty()) {
        awaited = std::move(late);
      } else if (internal::is_pair(call.op)) {
        cycle = internal::chain_of(call, rank(), call.root, [&positions](int r) {
          const auto found = positions.find(r);
          const bool waits = found != positions.end() && found->second.awaited != Position::kNone;
          return waits ? found->second.awaited : r;
        });
      }
      if (transport_.test()) {
        if (shows_awaited) set_position(Position::kNone, size());
        return true;
      }
      if (const auto departure = departure_among(awaited)) fail(*departure, call);
    }
    if (cycle) fail_late({call.root}, call, cycle->text, cycle->late);
    fail_late(awaited, call, {}, awaited);
  }
}

bool Channel::is_impossible(Question& question) {
  const auto now = Clock::now();
  if (now < question.time) return false;
  const std::lock_guard lock(control_->mutex);
  if (question.is_answered) return true;
  const std::uint64_t own = control_->position.number;
  if (!question.is_asked) {
    question.is_asked = true;
    control_->answers.clear();
    transport_.send_control(
        {.kind = ControlMessage::Kind::question, .position = {.rank = rank(), .number = own + 1}},
        question.peer);
    return false;
  }
  const auto answer = control_->answers.find(question.peer);
  // A peer that waits in an exchange that this rank has not begun waits for this rank.
  if (answer == control_->answers.end() || answer->second.number <= own ||
      answer->second.awaited == Position::kNone) {
    return false;
  }
  question.header = answer->second.header;
  question.is_answered = true;
  question.time = now + kTransitTime;  // its message may have been sent before
  return false;
}

std::map<int, Position> Channel::ask_positions(const Call& call) {
  const Position own = [this] {
    const std::lock_guard lock(control_->mutex);
    control_->answers.clear();
    return control_->position;
  }();
  transport_.send_control(
      {.kind = ControlMessage::Kind::question, .position = {.rank = rank(), .number = own.number}});
  const auto n = static_cast<std::size_t>(size());
  std::map<int, Position> positions;
  for (const auto end = Clock::now() + kAnswerTime; Clock::now() < end && positions.size() + 1 < n;
       std::this_thread::sleep_for(std::chrono::microseconds(100))) {
    poll_control();
    throw_if_failed(call);
    const std::lock_guard lock(control_->mutex);
    positions = control_->answers;
  }
  positions.insert_or_assign(rank(), own);
  return positions;
}

std::vector<int> Channel::find_late(std::map<int, Position> positions,
                                    std::span<const int> awaited) const {
  const auto n = static_cast<std::size_t>(size());
  const Position own = positions.at(rank());
  // Ranks that are in other calls are late too, but not those that wait in an earlier exchange.
  std::erase_if(positions, [&own](const auto& answer) {
    return answer.second.number < own.number && answer.second.awaited == Position::kNone;
  });
  std::vector<bool> has_begun(n), is_awaited(n);
  for (const int r : awaited) is_awaited[static_cast<std::size_t>(r)] = true;
  for (const auto& [r, position] : positions) {
    if (position.awaited != Position::kNone) {
      is_awaited[static_cast<std::size_t>(position.awaited)] = true;
    }
    if (position.number < own.number) continue;
    if (position.number > own.number || position.awaited == Position::kNone) {
      has_begun.assign(n, true);  // it is complete
      continue;
    }
    for (int i = 0; i < position.n_known; ++i) {
      has_begun[(static_cast<std::size_t>(r) + n - static_cast<std::size_t>(i)) % n] = true;
    }
  }
  // A rank that waits in a call on another channel may answer too, that it awaits nobody here.
  const auto waits_itself = [&](int r) {
    const auto answer = positions.find(r);
    return answer != positions.end() && (has_rounds_ || answer->second.awaited != Position::kNone);
  };
  // Ranks that have not begun; if all have, those that others wait for and that do not wait.
  std::vector<int> late;
  for (const bool is_about_beginning : {true, false}) {
    for (int r = 0; r < size(); ++r) {
      const auto i = static_cast<std::size_t>(r);
      const bool may_be_late = is_about_beginning ? !has_begun[i] : is_awaited[i];
      if (may_be_late && !waits_itself(r)) late.push_back(r);
    }
    if (!late.empty()) break;
  }
  return late;
}

std::int64_t Channel::next_number() {
  const Transport& world = *world_->transport;
  const std::lock_guard lock(world_->mutex);
  return Transport::kWorld + 1 + world.rank() + world.size() * world_->n_numbers++;
}

std::unique_ptr<Channel> Channel::split(const std::vector<int>& members, std::int64_t number,
                                        const Call& call) {
  std::vector<int> world_ranks;
  for (const int member : members) {
    world_ranks.push_back(members_[static_cast<std::size_t>(member)]);
  }
  try {
    if (number > transport_.last_channel()) {
      throw TransportError(
          fmt::format("too many splits: groups are numbered, here up to {}, and no number is used "
                      "twice; keep groups instead of making them again",
                      transport_.last_channel()));
    }
    auto part = transport_.split(members, static_cast<std::int32_t>(number));
    return std::unique_ptr<Channel>(new Channel(std::move(part), std::move(world_ranks), world_));
  } catch (const TransportError& error) {
    fail_transport(error, call);
  }
}

void Channel::poll_control() {
  world_->poll();
  if (control_ != world_) control_->poll();
}

void Channel::throw_if_failed(const Call& call) const {
  const std::lock_guard lock(control_->mutex);
  if (control_->failure) internal::throw_failure(*control_->failure, context_of(call, rank()));
}

std::optional<Failure> Channel::departure_among(std::span<const int> ranks) const {
  const std::lock_guard lock(world_->mutex);
  for (const int rank : ranks) {
    const auto found = world_->departures.find(members_[static_cast<std::size_t>(rank)]);
    if (found == world_->departures.end()) continue;
    Failure departure = found->second;
    departure.culprit = rank;
    return departure;
  }
  return std::nullopt;
}

bool Channel::has_left() const {
  const std::lock_guard lock(world_->mutex);
  return world_->has_left;
}

void Channel::notify(const Failure& failure) noexcept {
  try {
    {
      const std::lock_guard lock(control_->mutex);
      if (!control_->failure) control_->failure = failure;  // for a thread of this rank
    }
    // After its departure, which tells the peers all, this process may end at any time: the peers
    // would begin to receive a message that is never sent.
    transport_.send_control({.failure = failure}, has_left() ? rank() : Transport::kAllRanks);
  } catch (const std::bad_alloc&) {  // for the text: the peers time out
  }
}

void Channel::fail(Failure failure, const Call& call) {
  poll_control();
  throw_if_failed(call);  // all ranks throw the first failure
  if (failure.culprit != Failure::kNoCulprit) failure.culprit = call.number_of(failure.culprit);
  failure.peers = internal::PeerList::of(internal::numbers_of(call, failure.peers.get()));
  notify(failure);  // also of a departure: peers may wait for this rank, not for the one that left
  internal::throw_failure(failure, context_of(call, rank()));
}

void Channel::fail_transport(const TransportError& error, const Call& call) {
  const int peer = error.peer();
  if (peer != TransportError::kNoPeer) {
    for (const auto end = Clock::now() + kControlDelay; Clock::now() < end;) {
      poll_control();
      throw_if_failed(call);
      if (const auto departure = departure_among(std::span(&peer, 1))) fail(*departure, call);
      std::this_thread::sleep_for(milliseconds(5));
    }
  }
  if (error.is_closed()) {
    fail({.kind = Kind::peer_lost, .culprit = peer, .text = error.what()}, call);
  }
  notify({.kind = Kind::peer_failed, .culprit = call.number_of(rank()), .text = error.what()});
  throw EngineError(context_of(call, rank()),
                    peer == TransportError::kNoPeer
                        ? error.what()
                        : fmt::format("with rank {}: {}", call.number_of(peer), error.what()));
}

void Channel::fail_late(const std::vector<int>& awaited, const Call& call, std::string_view detail,
                        const std::vector<int>& late) {
  fail({.kind = Kind::timeout,
        .text = internal::text_of_wait(call, rank(), awaited, size()).append(detail),
        .peers = internal::PeerList::of(late)},
       call);
}

std::uint64_t& Channel::n_calls(Op op, int peer) {
  return internal::is_pair(op) ? n_pairs_[{op, peer}] : n_collectives_;
}

void Channel::refuse(const Refusal& refusal) noexcept {
  try {
    const Op op = !refusal.is_pair ? Op::barrier : refusal.is_send ? Op::send : Op::recv;
    Position position{.rank = rank(), .number = n_calls(op, refusal.peer)};
    position.header.op = static_cast<std::uint8_t>(op);
    position.header.root = refusal.peer;
    position.header.n_refused = refusal.n_refused;
    const std::string text(refusal.text);
    {
      const std::lock_guard lock(control_->mutex);
      control_->refusals.push_back({position, text});
    }
    transport_.send_control({.kind = ControlMessage::Kind::refusal,
                             .failure = {.kind = Kind::usage, .text = text},
                             .position = position},
                            refusal.is_pair ? refusal.peer : Transport::kAllRanks);
  } catch (const std::bad_alloc&) {
    abandon(refusal.text);
  }
}

void Channel::throw_if_refused(const Call& call) {
  const bool is_pair = internal::is_pair(call.op);
  // Of a send, the receives that its peer refused.
  const Op op = !is_pair ? Op::barrier : call.op == Op::send ? Op::recv : Op::send;
  int refuser = -1;
  {
    const std::lock_guard lock(control_->mutex);
    for (const auto& [of, text] : control_->refusals) {
      if (of.rank == rank() || static_cast<Op>(of.header.op) != op) continue;
      if (is_pair && of.rank != call.root) continue;
      if (of.header.n_refused > call.n_refused && of.number < n_calls(call.op, call.root)) {
        refuser = of.rank;
      }
    }
  }
  if (refuser < 0) return;
  const Row own{rank(), headers_.of(call)};
  const std::span<const Row> rows(&own, 1);
  fail(difference_of(call, rows, refused_calls(rows, call)), call);
}

std::vector<RefusedCall> Channel::refused_calls(std::span<const Row> rows, const Call& call) {
  const std::uint32_t least = std::ranges::min(rows, {}, [](const Row& row) {
                                return row.header.n_refused;
                              }).header.n_refused;
  const bool is_pair = internal::is_pair(call.op);
  const Op peers_op = !is_pair ? Op::barrier : call.op == Op::send ? Op::recv : Op::send;
  const auto is_of_call = [&](const Position& of) {
    const Op op = static_cast<Op>(of.header.op);
    if (of.header.n_refused <= least) return false;
    if (!is_pair) return op == Op::barrier;
    return of.rank == rank() ? op == call.op && of.header.root == call.root
                             : op == peers_op && of.rank == call.root;
  };
  std::vector<RefusedCall> calls;
  const auto has_come = [&](const Row& row) {
    return row.header.n_refused == least ||
           std::ranges::any_of(calls, [&](const auto& one) { return one.rank == row.rank; });
  };
  for (const auto end = Clock::now() + kControlDelay;;) {
    poll_control();
    calls.clear();
    {
      const std::lock_guard lock(control_->mutex);
      for (const auto& [of, text] : control_->refusals) {
        if (is_of_call(of)) calls.push_back({of.rank, text});
      }
    }
    if (std::ranges::all_of(rows, has_come) || Clock::now() >= end) return calls;
    std::this_thread::sleep_for(milliseconds(1));
  }
}

void Channel::abandon(std::string_view reason) noexcept {
  try {
    notify({.kind = Kind::peer_failed, .culprit = rank(), .text = std::string(reason)});
  } catch (const std::bad_alloc&) {
  }
}

void Channel::end_with(const Error& error) noexcept {
  try {
    notify(internal::failure_for_peers(error, rank()));
  } catch (const std::bad_alloc&) {
  }
}

void Channel::leave(std::string_view failure) noexcept {
  try {
    {
      const std::lock_guard lock(world_->mutex);
      world_->has_left = true;
    }
    transport_.send_control(
        {.kind = ControlMessage::Kind::departure,
         .failure = {.kind = failure.empty() ? Kind::peer_left : Kind::peer_failed,
                     .culprit = rank(),
                     .text = std::string(failure)}});
  } catch (const std::bad_alloc&) {
  }
}

}  // namespace lockstep::message
