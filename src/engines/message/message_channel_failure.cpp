// What ends a channel: failures, departures, and calls that ranks refuse.

#include <fmt/format.h>

#include <algorithm>
#include <lockstep/error.hpp>
#include <new>
#include <thread>
#include <utility>

#include "base/patience.hpp"
#include "engines/message/message_channel.hpp"
#include "group/wait_chain.hpp"
#include "record/signature.hpp"

namespace lockstep::message {
namespace {

using Clock = detail::JobClock;
using internal::Failure;
using Kind = Failure::Kind;
using std::chrono::milliseconds;

}  // namespace

void MessageChannel::poll_control() {
  world_->poll();
  if (control_ != world_) control_->poll();
}

void MessageChannel::throw_if_failed(const Call& call) const {
  if (const auto failure = control_->failure()) {
    internal::throw_failure(*failure, context_of(call, rank()));
  }
  // Every rank has it from its own launcher, in the numbers of the world.
  if (auto verdict = transport_.verdict()) {
    const auto member = std::ranges::find(members_, verdict->culprit);
    verdict->culprit = member == members_.end()
                           ? Failure::kNoCulprit
                           : call.number_of(static_cast<int>(member - members_.begin()));
    internal::throw_failure(*verdict, context_of(call, rank()));
  }
}

std::optional<Failure> MessageChannel::departure_among(std::span<const int> ranks) const {
  for (const int rank : ranks) {
    auto departure = world_->departure_of(members_[static_cast<std::size_t>(rank)]);
    if (!departure) continue;
    departure->culprit = rank;
    return departure;
  }
  return std::nullopt;
}

void MessageChannel::notify(const Failure& failure) noexcept {
  try {
    control_->set_failure(failure);  // for a thread of this rank
    // After the departure, which is all that peers need, this process may end at any time: peers
    // would begin to receive a message that is never completed.
    transport_.send_control({.failure = failure},
                            world_->has_left() ? rank() : Transport::kAllRanks);
  } catch (const std::bad_alloc&) {  // for the text: the peers time out
  }
}

void MessageChannel::fail(Failure failure, const Call& call) {
  poll_control();
  throw_if_failed(call);  // all ranks throw the first failure
  if (failure.culprit != Failure::kNoCulprit) failure.culprit = call.number_of(failure.culprit);
  failure.peers = internal::PeerList::of(internal::numbers_of(call, failure.peers.get()));
  notify(failure);  // also of a departure: peers may wait for this rank, not for the one that left
  internal::throw_failure(failure, context_of(call, rank()));
}

void MessageChannel::fail_transport(const TransportError& error, const Call& call) {
  const int peer = error.peer();
  if (peer != TransportError::kNoPeer) {
    for (const auto end = Clock::now() + transport_.time_of_reason(); Clock::now() < end;) {
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

void MessageChannel::fail_late(const std::vector<int>& awaited, const Call& call,
                               std::string_view detail, const std::vector<int>& late) {
  fail({.kind = Kind::timeout,
        .text = internal::text_of_wait(call, rank(), awaited, size()).append(detail),
        .peers = internal::PeerList::of(late)},
       call);
}

void MessageChannel::abandon(std::string_view reason) noexcept {
  try {
    notify({.kind = Kind::peer_failed, .culprit = rank(), .text = std::string(reason)});
  } catch (const std::bad_alloc&) {
  }
}

void MessageChannel::end_with(const Error& error) noexcept {
  try {
    notify(internal::failure_for_peers(error, rank()));
  } catch (const std::bad_alloc&) {
  }
}

void MessageChannel::leave(std::string_view failure) noexcept {
  try {
    world_->set_left();
    transport_.send_control(
        {.kind = ControlMessage::Kind::departure,
         .failure = {.kind = failure.empty() ? Kind::peer_left : Kind::peer_failed,
                     .culprit = rank(),
                     .text = std::string(failure)}});
  } catch (const std::bad_alloc&) {
  }
}

void MessageChannel::refuse(const Refusal& refusal) noexcept {
  try {
    WaitState wait_state{.rank = rank(), .number = n_collectives_};
    wait_state.header.n_refused = refusal.n_refused;
    const std::string text(refusal.text);
    control_->add_refusal(wait_state, text);
    transport_.send_control({.kind = ControlMessage::Kind::refusal,
                             .failure = {.kind = Kind::usage, .text = text},
                             .wait_state = wait_state});
  } catch (const std::bad_alloc&) {
    abandon(refusal.text);
  }
}

void MessageChannel::throw_if_refused(const Call& call) {
  if (is_pair_) return;
  bool is_refused = false;
  control_->visit_refusals([&](const WaitState& of, const std::string&) {
    is_refused |=
        of.rank != rank() && of.header.n_refused > call.n_refused && of.number < n_collectives_;
  });
  if (!is_refused) return;
  const Row own{rank(), headers_.of(call)};
  const std::span<const Row> rows(&own, 1);
  fail(mismatch_failure(call, rows, refused_calls(rows)), call);
}

std::vector<RefusedCall> MessageChannel::refused_calls(std::span<const Row> rows) {
  const std::uint32_t least = std::ranges::min(rows, {}, [](const Row& row) {
                                return row.header.n_refused;
                              }).header.n_refused;
  std::vector<RefusedCall> calls;
  const auto has_arrived = [&](const Row& row) {
    return row.header.n_refused == least ||
           std::ranges::any_of(calls, [&](const auto& one) { return one.rank == row.rank; });
  };
  for (const auto end = Clock::now() + base::patience::kControlMessage;;) {
    poll_control();
    calls.clear();
    control_->visit_refusals([&](const WaitState& of, const std::string& text) {
      if (of.header.n_refused > least) calls.push_back({of.rank, text});
    });
    if (std::ranges::all_of(rows, has_arrived) || Clock::now() >= end) return calls;
    std::this_thread::sleep_for(milliseconds(1));
  }
}

}  // namespace lockstep::message
