#include "nn/c10d/c10d_channel.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <lockstep/error.hpp>
#include <numeric>
#include <thread>
#include <utility>

#include "base/no_sigpipe.hpp"

namespace lockstep::nn::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

using Kind = Failure::Kind;

/// The notice of a rank whose connection broke may still be arriving on another thread.
constexpr milliseconds kControlDelay{200};

/// libtorch's messages begin with the source line and may end with a C++ stack.
std::string text_of(const std::exception& error) {
  std::string text = error.what();
  return text.substr(0, text.find("\nException raised from"));
}

bool says_closed(std::string_view text) {
  for (const std::string_view sign :
       {"closed by peer", "reset by peer", "Broken pipe", "Socket closed", "Connection refused"}) {
    if (text.find(sign) != std::string_view::npos) return true;
  }
  return false;
}

}  // namespace

Channel::Channel(std::shared_ptr<Wire> wire)
    : wire_(std::move(wire)),
      members_(static_cast<std::size_t>(wire_->size())),
      rank_(wire_->rank()) {
  std::iota(members_.begin(), members_.end(), 0);
  // The first tag of rank 0, on every rank: no communication needed.
  tag_ = 1;
  if (rank_ == 0) wire_->next_channel();
}

Channel::Channel(const Channel& parent, const std::vector<int>& members, const Call& call,
                 Clock::time_point end)
    : wire_(parent.wire_), rank_(0), tag_(0) {
  for (const int member : members) {
    members_.push_back(parent.members_[static_cast<std::size_t>(member)]);
  }
  rank_ = rank_of(wire_->rank());
  // The first member chooses a tag that no other channel uses.
  std::vector<Message> messages;
  if (rank_ == 0) tag_ = wire_->next_channel();
  for (std::size_t r = 1; rank_ == 0 && r < members.size(); ++r) {
    messages.push_back({Message::Way::send, members[r], &tag_, sizeof(tag_)});
  }
  if (rank_ > 0) messages.push_back({Message::Way::receive, members[0], &tag_, sizeof(tag_)});
  parent.post(messages, call, end);
}

int Channel::rank_of(int wire_rank) const {
  return static_cast<int>(std::ranges::find(members_, wire_rank) - members_.begin());
}

void Channel::post(std::span<const Message> messages, const Call& call,
                   Clock::time_point end) const {
  if (wire_->is_copy()) {
    throw UsageError(lockstep::context_of(call, rank_),
                     "this process is a copy (fork) of a rank, whose connections it shares; only "
                     "the rank itself may call");
  }
  if (const auto failure = wire_->death_of(tag_)) fail(*failure, call);
  if (call.progress != nullptr) call.progress->slept(call);
  std::vector<const Message*> ordered;
  for (const Message& message : messages) ordered.push_back(&message);
  // Of two ranks the lower sends first: NCCL runs the messages of a pair in the order given.
  std::ranges::stable_partition(ordered, [this](const Message* message) {
    return (message->way == Message::Way::send) == (rank_ < message->peer);
  });

  Wire::Wait wait{tag_, end, {}, {}};
  std::vector<Wire::Parcel> parcels;
  const base::NoSigpipe no_sigpipe;
  for (const Message* message : ordered) {
    const int peer = members_[static_cast<std::size_t>(message->peer)];
    try {
      Wire::Parcel parcel = wire_->pack(*message, peer);
      std::vector<at::Tensor> one{parcel.tensor};
      wait.works.push_back(message->way == Message::Way::send
                               ? wire_->group_->send(one, peer, tag_)
                               : wire_->group_->recv(one, peer, tag_));
      wait.peers.push_back(peer);
      parcels.push_back(std::move(parcel));
    } catch (const std::exception& error) {
      wire_->finish(wait, parcels);
      fail_connection(peer, text_of(error), call);
    }
  }

  wire_->start(wait);
  int culprit = -1;
  std::string text;
  std::vector<int> ended;  // before their deadline
  for (std::size_t i = 0; i < wait.works.size() && culprit < 0; ++i) {
    try {
      parcels[i].is_done = wire_->wait_for(wait, i);
      if (!parcels[i].is_done) ended.push_back(wait.peers[i]);
    } catch (const std::exception& error) {
      culprit = wait.peers[i];
      text = text_of(error);
    }
  }
  wire_->finish(wait, parcels);
  if (culprit >= 0) fail_connection(culprit, text, call);
  if (!ended.empty()) {
    fail_if_known(ended, call);
    fail_late(std::move(ended), call);
  }
  for (const Wire::Parcel& parcel : parcels) wire_->unpack(parcel);
}

void Channel::fail_if_known(std::span<const int> ranks, const Call& call) const {
  if (const auto failure = wire_->death_of(tag_)) fail(*failure, call);
  if (const auto failure = wire_->departure_of(ranks)) {
    // A rank waiting for this one, and not for the one that left, would otherwise time out.
    tell(*failure);
    fail(*failure, call);
  }
}

void Channel::fail_connection(int culprit, const std::string& text, const Call& call) const {
  // The peer may have sent the reason to another thread.
  for (const auto end = Clock::now() + kControlDelay; Clock::now() < end;) {
    fail_if_known(std::span(&culprit, 1), call);
    std::this_thread::sleep_for(milliseconds(5));
  }
  if (says_closed(text)) {
    const Failure lost{.kind = Kind::peer_lost, .culprit = culprit, .text = text};
    tell(lost);
    fail(lost, call);
  }
  tell({.kind = Kind::peer_failed, .culprit = wire_->rank(), .text = text});
  throw EngineError(lockstep::context_of(call, rank_),
                    fmt::format("with rank {}: {}", rank_of(culprit), text));
}

void Channel::fail_late(std::vector<int> late, const Call& call) const {
  for (int& rank : late) rank = rank_of(rank);
  std::ranges::sort(late);
  late.erase(std::unique(late.begin(), late.end()), late.end());
  const std::string text = fmt::format("rank {} waited {:g} s for rank{} {} of {}", rank_,
                                       static_cast<double>(call.timeout.count()) / 1000,
                                       late.size() == 1 ? "" : "s", fmt::join(late, ", "), size());
  tell({.kind = Kind::timeout, .text = text});
  throw TimeoutError(lockstep::context_of(call, rank_), text);
}

void Channel::fail_mismatch(const std::string& table, const Call& call) {
  tell({.kind = Kind::mismatch, .text = table});
  throw MismatchError(lockstep::context_of(call, rank_), table);
}

void Channel::fail(Failure failure, const Call& call) const {
  if (failure.culprit != Failure::kNoCulprit) failure.culprit = rank_of(failure.culprit);
  internal::throw_failure(failure, lockstep::context_of(call, rank_));
}

void Channel::abandon(std::string_view reason) noexcept {
  try {
    tell({.kind = Kind::peer_failed, .culprit = wire_->rank(), .text = std::string(reason)});
  } catch (...) {  // no memory for the text: the peers time out
  }
}

void Channel::end_with(const Error& error) noexcept {
  try {
    tell(internal::failure_for_peers(error, wire_->rank()));
  } catch (...) {  // no memory for the text: the peers time out
  }
}

void Channel::leave(std::string_view failure) noexcept {
  try {
    std::vector<int> all(static_cast<std::size_t>(wire_->size()));
    std::iota(all.begin(), all.end(), 0);
    wire_->tell(Wire::kWholeRank,
                {.kind = failure.empty() ? Kind::peer_left : Kind::peer_failed,
                 .culprit = wire_->rank(),
                 .text = std::string(failure)},
                all);
    wire_->flush();
  } catch (...) {
  }
}

}  // namespace lockstep::nn::detail
