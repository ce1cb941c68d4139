// How an exchange waits, and whom it then finds late.

#include <algorithm>
#include <map>
#include <optional>
#include <thread>

#include "engines/message/message_channel.hpp"
#include "group/wait_chain.hpp"
#include "record/progress.hpp"
#include "record/signature.hpp"

namespace lockstep::message {
namespace {

using Clock = std::chrono::steady_clock;
using State = Transport::State;
using std::chrono::milliseconds;

/// How long messages that a rank sent before it left may still be in transit.
constexpr milliseconds kTransitTime{500};
/// How long a rank that runs takes at most to answer a question. A rank that is late is named that
/// much after the call's time.
constexpr milliseconds kAnswerTime{250};
/// How long a rank waits for its peer in a send or recv before it asks whether that can end.
constexpr milliseconds kQuestionDelay{200};

}  // namespace

/// Whether an exchange with one peer can ever complete.
struct Channel::Question {
  int peer;
  Header& header;  // of the call in which the peer waits
  Clock::time_point time = Clock::now() + kQuestionDelay;
  bool is_asked = false;
  bool is_answered = false;
};

bool Channel::exchange_with(int peer, std::span<const Message> messages, Header& header,
                            const Call& call, Limit& limit) {
  if (!has_rounds_) return perform(messages, call, limit, nullptr);
  Question question{.peer = peer, .header = header};
  return perform(messages, call, limit, &question);
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
      if (shows_awaited) control_->set_position(Position::kNone, size());
      return true;
    }
    std::vector<int> awaited = transport_.awaited();
    std::ranges::sort(awaited);
    awaited.erase(std::unique(awaited.begin(), awaited.end()), awaited.end());
    // Before a question is answered, which may be what ended the wait.
    if (shows_awaited && !awaited.empty()) control_->set_position(awaited.front(), size());
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
        if (shows_awaited) control_->set_position(Position::kNone, size());
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
  if (question.is_answered) return true;
  const std::uint64_t own = control_->position().number;
  if (!question.is_asked) {
    question.is_asked = true;
    control_->ask(own + 1, question.peer);
    return false;
  }
  const auto answers = control_->answers();
  const auto answer = answers.find(question.peer);
  // A peer that waits in an exchange that this rank has not begun waits for this rank.
  if (answer == answers.end() || answer->second.number <= own ||
      answer->second.awaited == Position::kNone) {
    return false;
  }
  question.header = answer->second.header;
  question.is_answered = true;
  question.time = now + kTransitTime;  // its message may have been sent before
  return false;
}

std::map<int, Position> Channel::ask_positions(const Call& call) {
  const Position own = control_->position();
  control_->ask(own.number);
  const auto n = static_cast<std::size_t>(size());
  std::map<int, Position> positions;
  for (const auto end = Clock::now() + kAnswerTime; Clock::now() < end && positions.size() + 1 < n;
       std::this_thread::sleep_for(std::chrono::microseconds(100))) {
    poll_control();
    throw_if_failed(call);
    positions = control_->answers();
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

}  // namespace lockstep::message
