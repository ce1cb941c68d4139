#include "nn/gloo_engine/c10d_transport.hpp"

#include <algorithm>
#include <exception>
#include <lockstep/error.hpp>
#include <new>
#include <numeric>
#include <string>
#include <utility>

#include "base/no_sigpipe.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "nn/gloo_engine/c10d_error.hpp"
#include "record/progress.hpp"

namespace lockstep::nn::detail {
namespace {

/// Over Gloo, a rank that waits looks this often for status queries.
constexpr std::chrono::milliseconds kControlInterval{50};

std::vector<int> all_ranks_of(const Wire& wire) {
  std::vector<int> ranks(static_cast<std::size_t>(wire.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

message::TransportError transport_error(const std::exception& error, int peer) {
  const C10dError told = c10d_error(error);
  return message::TransportError(told.text, peer, told.kind == C10dError::Kind::peer_lost);
}

}  // namespace

Transport::Transport(std::shared_ptr<Wire> wire) : Transport(wire, all_ranks_of(*wire), kWorld) {}

Transport::Transport(std::shared_ptr<Wire> wire, std::vector<int> members, int channel)
    : wire_(std::move(wire)),
      members_(std::move(members)),
      rank_(rank_of(wire_->rank())),
      channel_(channel) {}

int Transport::rank_of(int wire_rank) const {
  return static_cast<int>(std::ranges::find(members_, wire_rank) - members_.begin());
}

void Transport::start(std::span<const Message> messages, const Call& call) {
  if (wire_->is_forked_child()) {
    throw UsageError(lockstep::context_of(call, rank_),
                     "this process is a copy (fork) of a rank, whose connections it shares; only "
                     "the rank itself may call");
  }
  if (call.progress != nullptr) call.progress->slept(call);  // the calls below may block
  std::vector<const Message*> ordered;
  for (const Message& message : messages) ordered.push_back(&message);
  // Gloo permits a message when its receive is posted, by a message of its own, which would wait
  // behind a long one in the same direction: receives first, or two ranks that send to each other
  // do so one after the other. Of two ranks over NCCL the lower sends first: it runs the messages
  // of a pair in the order given.
  std::ranges::stable_partition(ordered, [this](const Message* message) {
    const bool sends_first = !wire_->is_gloo_ && rank_ < message->peer;
    return (message->direction == Message::Direction::send) == sends_first;
  });

  wait_ = {.channel = channel_, .deadline = {}, .works = {}, .peers = {}};
  transfers_.clear();
  // Room for all first: a message that has been begun must be kept, or its connection stops.
  wait_.works.reserve(ordered.size());
  wait_.peers.reserve(ordered.size());
  transfers_.reserve(ordered.size());
  const base::NoSigpipe no_sigpipe;
  for (const Message* message : ordered) {
    const int peer = members_[static_cast<std::size_t>(message->peer)];
    try {
      Wire::Transfer transfer = wire_->stage(*message, peer);
      std::vector<at::Tensor> one{transfer.tensor};
      wait_.works.push_back(message->direction == Message::Direction::send
                                ? wire_->group_->send(one, peer, channel_)
                                : wire_->group_->recv(one, peer, channel_));
      wait_.peers.push_back(peer);
      transfers_.push_back(std::move(transfer));
    } catch (const std::bad_alloc&) {  // not the peer's doing
      cancel();
      throw;
    } catch (const std::exception& error) {
      cancel();
      throw transport_error(error, message->peer);
    }
  }
}

Transport::State Transport::wait(lockstep::detail::JobClock::time_point deadline) {
  const base::NoSigpipe no_sigpipe;
  awaited_.clear();
  const auto end = answers_status_queries()
                       ? std::min(deadline, lockstep::detail::JobClock::now() + kControlInterval)
                       : deadline;
  wait_.deadline = end;
  wire_->start(wait_);
  std::optional<message::TransportError> failure;
  for (std::size_t i = 0; i < wait_.works.size() && !failure; ++i) {
    if (transfers_[i].is_done) continue;
    const int peer = rank_of(wait_.peers[i]);
    try {
      transfers_[i].is_done = wire_->wait_for(wait_, i);
      if (!transfers_[i].is_done) awaited_.push_back(peer);
    } catch (const std::exception& error) {
      failure = transport_error(error, peer);
    }
  }
  const bool is_complete = !failure && awaited_.empty();
  if (!is_complete && !failure && end < deadline) {
    wire_->pause(wait_);
    return State::pending;
  }
  wire_->finish(wait_, transfers_);  // from now on, nothing ends the transfers
  if (is_complete) {
    for (const Wire::Transfer& transfer : transfers_) wire_->unstage(transfer);
  }
  release();
  if (failure) throw *failure;
  return is_complete ? State::complete : State::ended;
}

void Transport::cancel() noexcept {
  if (wire_->is_forked_child()) return;
  wire_->finish(wait_, transfers_);
  release();
}

void Transport::release() noexcept {
  wait_.works.clear();  // before the callers' memory
  transfers_.clear();
}

std::optional<internal::Failure> Transport::verdict() const {
  const shared::Elastic* const elastic = wire_->elastic();
  if (elastic == nullptr || !elastic->is_over()) return std::nullopt;
  internal::Failure failure = elastic->why_over();
  failure.culprit = internal::Failure::kNoCulprit;  // in the numbers of another group
  return failure;
}

std::chrono::milliseconds Transport::time_of_reason() const noexcept {
  const auto usual = message::Transport::time_of_reason();
  const shared::Elastic* const elastic = wire_->elastic();
  return elastic == nullptr ? usual : std::max(usual, elastic->time_of_verdict());
}

std::unique_ptr<message::Transport> Transport::split(const std::vector<int>& members,
                                                     std::int32_t channel,
                                                     std::span<const std::byte> /*addresses*/) {
  std::vector<int> wire_ranks;
  for (const int member : members) {
    wire_ranks.push_back(members_[static_cast<std::size_t>(member)]);
  }
  return std::make_unique<Transport>(wire_, std::move(wire_ranks), channel);
}

}  // namespace lockstep::nn::detail
