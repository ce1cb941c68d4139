#include "engines/message/message_channel.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <lockstep/error.hpp>
#include <map>
#include <mutex>
#include <new>
#include <numeric>
#include <thread>
#include <utility>

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

}  // namespace

/// What the control messages of a channel said. Threads: any.
struct Channel::Control {
  explicit Control(std::unique_ptr<Transport> channel) : transport(std::move(channel)) {}

  void poll() {
    const std::lock_guard lock(mutex);
    while (auto message = transport->poll_control()) {
      if (message->is_departure) {
        departures.emplace(message->failure.culprit, std::move(message->failure));
      } else if (!failure) {
        failure = std::move(message->failure);
      }
    }
  }

  const std::unique_ptr<Transport> transport;
  std::mutex mutex;                // guards the following
  std::optional<Failure> failure;  // the first: why the channel is dead
  std::map<int, Failure> departures;
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
    if (!transport_.test()) wait(call, limit);
    exchange.is_complete = true;
  } catch (const TransportError& error) {
    fail_transport(error, call);
  }
}

void Channel::wait(const Call& call, Limit& limit) {
  if (call.progress != nullptr) call.progress->slept(call);  // polling counts as sleep
  const auto deadline = limit.end();                         // begins now
  std::optional<Clock::time_point> departure_seen;
  for (;;) {
    const State state = transport_.wait(deadline);
    if (state == State::complete) return;
    poll_control();
    throw_if_failed(call);
    std::vector<int> awaited = transport_.awaited();
    std::ranges::sort(awaited);
    awaited.erase(std::unique(awaited.begin(), awaited.end()), awaited.end());
    const auto now = Clock::now();
    const bool has_ended = state == State::ended;
    if (const auto departure = departure_among(awaited)) {
      if (!departure_seen) departure_seen = now;
      if (has_ended || now >= deadline || now - *departure_seen >= kTransitTime) {
        fail(*departure, call);
      }
    }
    // None are awaited if the last message has arrived since.
    if ((has_ended || now >= deadline) && !awaited.empty()) fail_late(awaited, call);
  }
}

std::unique_ptr<Channel> Channel::split(const std::vector<int>& members, const Call& call,
                                        Limit& limit) {
  std::vector<int> world_ranks;
  for (const int member : members) {
    world_ranks.push_back(members_[static_cast<std::size_t>(member)]);
  }
  try {
    auto part = transport_.split(
        members, [&](std::span<const Message> messages) { exchange(messages, call, limit); });
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

void Channel::notify(const Failure& failure) noexcept {
  try {
    {
      const std::lock_guard lock(control_->mutex);
      if (!control_->failure) control_->failure = failure;  // for a thread of this rank
    }
    transport_.send_control({.failure = failure});
  } catch (const std::bad_alloc&) {  // for the text: the peers time out
  }
}

void Channel::fail(const Failure& failure, const Call& call) {
  poll_control();
  throw_if_failed(call);  // all ranks throw the first failure
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
  notify({.kind = Kind::peer_failed, .culprit = rank(), .text = error.what()});
  throw EngineError(context_of(call, rank()),
                    peer == TransportError::kNoPeer
                        ? error.what()
                        : fmt::format("with rank {}: {}", peer, error.what()));
}

void Channel::fail_late(const std::vector<int>& late, const Call& call) {
  fail({.kind = Kind::timeout,
        .text = fmt::format("rank {} waited {:g} s for rank{} {} of {}", rank(),
                            std::chrono::duration<double>(call.timeout).count(),
                            late.size() == 1 ? "" : "s", fmt::join(late, ", "), size()),
        .peers = internal::PeerList::of(late)},
       call);
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
    transport_.send_control(
        {.is_departure = true,
         .failure = {.kind = failure.empty() ? Kind::peer_left : Kind::peer_failed,
                     .culprit = rank(),
                     .text = std::string(failure)}});
  } catch (const std::bad_alloc&) {
  }
}

}  // namespace lockstep::message
