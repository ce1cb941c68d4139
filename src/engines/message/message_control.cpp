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
      case ControlMessage::Kind::question: questions_.push_back(message->position); break;
      case ControlMessage::Kind::refusal:
        refusals_.push_back({message->position, std::move(message->failure.text)});
        break;
      case ControlMessage::Kind::position:
        answers_.insert_or_assign(message->position.rank, message->position);
        break;
    }
  }
  answer_questions();
}

/// Of an exchange that this rank has not begun: the answer is given then, and before once if this
/// rank waits in an earlier one.
void Control::answer_questions() {
  std::erase_if(questions_, [this](Position& question) {
    const bool has_begun = position_.number >= question.number;
    const bool waits = position_.awaited != Position::kNone;
    if (has_begun || (waits && question.awaited == Position::kNone)) {
      transport_->send_control({.kind = ControlMessage::Kind::position, .position = position_},
                               question.rank);
      question.awaited = position_.awaited;
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

Position Control::position() const {
  const std::lock_guard lock(mutex_);
  return position_;
}

void Control::begin_exchange(const Header& header) {
  const std::lock_guard lock(mutex_);
  ++position_.number;
  position_.awaited = transport_->rank();  // it does not wait yet
  position_.n_known = 1;
  position_.header = header;
}

void Control::set_position(int awaited, int n_known) {
  const std::lock_guard lock(mutex_);
  position_.awaited = awaited;
  position_.n_known = n_known;
}

void Control::ask(std::uint64_t number, int to) {
  {
    const std::lock_guard lock(mutex_);
    answers_.clear();
  }
  transport_->send_control({.kind = ControlMessage::Kind::question,
                            .position = {.rank = transport_->rank(), .number = number}},
                           to);
}

std::map<int, Position> Control::answers() const {
  const std::lock_guard lock(mutex_);
  return answers_;
}

void Control::add_refusal(const Position& of, const std::string& text) {
  const std::lock_guard lock(mutex_);
  refusals_.push_back({of, text});
}

}  // namespace lockstep::message
