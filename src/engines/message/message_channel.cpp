#include "engines/message/message_channel.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "record/progress.hpp"

namespace lockstep::message {

MessageChannel::MessageChannel(std::unique_ptr<Transport> transport)
    : control_(std::make_shared<Control>(std::move(transport))),
      world_(control_),
      transport_(control_->transport()),
      members_(static_cast<std::size_t>(transport_.size())) {
  std::iota(members_.begin(), members_.end(), 0);
}

MessageChannel::MessageChannel(std::unique_ptr<Transport> transport, std::vector<int> members,
                               std::shared_ptr<Control> world)
    : control_(std::make_shared<Control>(std::move(transport))),
      world_(std::move(world)),
      transport_(control_->transport()),
      members_(std::move(members)) {}

void MessageChannel::exchange(std::span<const Message> messages, const Call& call, Limit& limit) {
  perform(messages, call, limit, nullptr);
}

void MessageChannel::begin_rounds(const Header& header) {
  control_->begin_exchange(header);
  is_in_rounds_ = true;
}

void MessageChannel::round(std::span<const Message> messages, int awaited, int n_known,
                           const Call& call, Limit& limit) {
  control_->set_wait_state(awaited, n_known);
  perform(messages, call, limit, nullptr);
}

void MessageChannel::end_rounds() {
  control_->set_wait_state(WaitState::kNone, size());
  is_in_rounds_ = false;
}

/// The index of a message in the order of exchange: both ranks of a message compute the same index,
/// no two messages to one rank, or from one rank, share an index, and neighbouring ranks come
/// first. Blocks of B ranks, the largest power of two that divides N, exchange in a ring, and
/// within a pair of blocks rank i exchanges with i XOR 0, 1, ... B - 1. With aligned blocks, the
/// messages of a window cross equally many switches, so they complete at about the same time.
int MessageChannel::exchange_index(const Message& message) const {
  const int shift = std::countr_zero(static_cast<unsigned>(size()));  // B is 1 << shift
  const bool is_sent = message.direction == Message::Direction::send;
  const int from = is_sent ? rank() : message.peer, to = is_sent ? message.peer : rank();
  int n_blocks = (to >> shift) - (from >> shift);
  if (n_blocks < 0) n_blocks += size() >> shift;
  return (n_blocks << shift) + ((from ^ to) & ((1 << shift) - 1));
}

/// A rank completes a window before it begins the next. A message waits only for a rank in the same
/// or an earlier window, so the ranks in the earliest one always get on: no deadlock. If a rank
/// stops, those that wait for it do not begin their next window, for which others wait. All publish
/// for which rank they wait (wait states), and so find the one that waits for none: it is late.
void MessageChannel::exchange_in_windows(std::span<Message> messages, const Call& call,
                                         Limit& limit) {
  const auto window_of = [this](const Message& message) {
    return exchange_index(message) / kWindow;
  };
  // Messages between two ranks stay in order.
  std::ranges::stable_sort(messages, {},
                           [this](const Message& message) { return exchange_index(message); });
  for (std::size_t begin = 0, end = 0; begin < messages.size(); begin = end) {
    const int window = window_of(messages[begin]);
    while (end < messages.size() && window_of(messages[end]) == window) ++end;
    perform(messages.subspan(begin, end - begin), call, limit, nullptr);
  }
}

bool MessageChannel::perform(std::span<const Message> messages, const Call& call, Limit& limit,
                             StatusQuery* query) {
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
    exchange.is_complete = transport_.test() || wait(call, limit, query);
  } catch (const TransportError& error) {
    fail_transport(error, call);
  }
  return exchange.is_complete;
}

std::unique_ptr<MessageChannel> MessageChannel::split(const std::vector<int>& members,
                                                      std::int64_t number, const Call& call) {
  std::vector<int> world_ranks;
  for (const int member : members) {
    world_ranks.push_back(members_[static_cast<std::size_t>(member)]);
  }
  try {
    if (number > transport_.last_channel()) {
      throw TransportError(
          fmt::format("too many splits: at most {} groups, because their numbers are not "
                      "reused; keep groups instead of creating them again",
                      transport_.last_channel()));
    }
    auto part = transport_.split(members, static_cast<std::int32_t>(number));
    return std::unique_ptr<MessageChannel>(
        new MessageChannel(std::move(part), std::move(world_ranks), world_));
  } catch (const TransportError& error) {
    fail_transport(error, call);
  }
}

}  // namespace lockstep::message
