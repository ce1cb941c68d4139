#include "engines/message/message_control.hpp"

#include <utility>

namespace lockstep::message {

using internal::Failure;

void Control::poll() {
  const std::lock_guard lock(mutex_);
  while (auto message = transport_->poll_control()) {
    switch (message->kind) {
      case ControlMessage::Kind::failure:
        if (!failure_) failure_ = std::move(message->failure);
        break;
      case ControlMessage::Kind::departure:
        departures_.emplace(message->failure.culprit, std::move(message->failure));
        break;
      case ControlMessage::Kind::status_query: queries_.push_back(message->wait_state); break;
      case ControlMessage::Kind::refusal:
        refusals_.push_back({message->wait_state, std::move(message->failure.text)});
        break;
      case ControlMessage::Kind::status_reply:
        answers_.insert_or_assign(message->wait_state.rank, message->wait_state);
        break;
    }
  }
  answer_queries();
}

/// A query about a collective that this rank has not begun is answered when this rank begins it,
/// and also once before that, if this rank waits in an earlier one.
void Control::answer_queries() {
  std::erase_if(queries_, [this](WaitState& query) {
    const bool has_begun = wait_state_.number >= query.number;
    const bool waits = wait_state_.awaited.n > 0;
    if (has_begun || (waits && query.awaited.n == 0)) {
      transport_->send_control(
          {.kind = ControlMessage::Kind::status_reply, .wait_state = wait_state_}, query.rank);
      query.awaited = wait_state_.awaited;
    }
    return has_begun;
  });
}

std::optional<Failure> Control::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Control::set_failure(const Failure& failure) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = failure;
}

std::optional<Failure> Control::departure_of(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = departures_.find(rank);
  return found == departures_.end() ? std::nullopt : std::optional(found->second);
}

bool Control::has_left() const {
  const std::lock_guard lock(mutex_);
  return has_left_;
}

void Control::set_left() {
  const std::lock_guard lock(mutex_);
  has_left_ = true;
}

std::int64_t Control::next_number() {
  const std::lock_guard lock(mutex_);
  return Transport::kWorld + 1 + transport_->rank() + transport_->size() * n_numbers_++;
}

WaitState Control::wait_state() const {
  const std::lock_guard lock(mutex_);
  return wait_state_;
}

void Control::begin_collective(const Header& header) {
  const std::lock_guard lock(mutex_);
  ++wait_state_.number;
  wait_state_.header = header;
}

void Control::set_awaited(std::span<const int> ranks) {
  const std::lock_guard lock(mutex_);
  wait_state_.awaited = internal::PeerList::of(ranks);
}

void Control::ask(std::uint64_t number, int to) {
  {
    const std::lock_guard lock(mutex_);
    answers_.clear();
  }
  transport_->send_control({.kind = ControlMessage::Kind::status_query,
                            .wait_state = {.rank = transport_->rank(), .number = number}},
                           to);
}

std::map<int, WaitState> Control::answers() const {
  const std::lock_guard lock(mutex_);
  return answers_;
}

void Control::add_refusal(const WaitState& of, const std::string& text) {
  const std::lock_guard lock(mutex_);
  refusals_.push_back({of, text});
}

}  // namespace lockstep::message
