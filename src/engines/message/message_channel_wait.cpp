// How an exchange waits, and which ranks it then reports as late.

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "base/patience.hpp"
#include "engines/message/message_channel.hpp"
#include "group/wait_chain.hpp"
#include "record/progress.hpp"
#include "record/signature.hpp"

namespace lockstep::message {
namespace {

using Clock = detail::JobClock;
using State = Transport::State;

}  // namespace

/// Whether an exchange with one peer can ever complete.
struct MessageChannel::StatusQuery {
  int peer;
  Header& header;  // of the call in which the peer waits
  Clock::time_point time = Clock::now() + base::patience::kQuery;
  bool is_asked = false;
  bool is_answered = false;
};

bool MessageChannel::exchange_with(int peer, std::span<const Message> messages, Header& header,
                                   const Call& call, Limit& limit) {
  if (!has_levels_) return perform(messages, call, limit, nullptr);
  StatusQuery query{.peer = peer, .header = header};
  return perform(messages, call, limit, &query);
}

bool MessageChannel::wait(const Call& call, Limit& limit, StatusQuery* query) {
  if (call.progress != nullptr) call.progress->slept(call);  // polling counts as sleep
  const auto deadline = limit.end();                         // begins now
  std::optional<Clock::time_point> departure_seen;
  // Ranks that wait for this one, even in a later call, must be able to find the ranks that it
  // waits for.
  const bool shows_awaited = transport_.answers_status_queries();
  for (;;) {
    const State state = transport_.wait(deadline);
    if (state == State::complete) {
      if (shows_awaited) control_->set_awaited({});
      return true;
    }
    std::vector<int> awaited = transport_.awaited();
    std::ranges::sort(awaited);
    awaited.erase(std::unique(awaited.begin(), awaited.end()), awaited.end());
    // Before a status query is answered, which may be what ended the wait.
    if (shows_awaited && !awaited.empty()) control_->set_awaited(awaited);
    poll_control();
    throw_if_failed(call);
    throw_if_refused(call);
    if (query != nullptr && is_impossible(*query)) return false;
    const auto now = Clock::now();
    const bool has_ended = state == State::ended;
    if (const auto departure = departure_among(awaited)) {
      if (!departure_seen) departure_seen = now;
      if (has_ended || now >= deadline || now - *departure_seen >= base::patience::kTransit) {
        fail(*departure, call);
      }
    }
    // None are awaited if the last message has arrived since.
    if ((!has_ended && now < deadline) || awaited.empty()) continue;
    std::optional<internal::WaitChain> cycle;
    if (transport_.answers_status_queries()) {
      const std::map<int, WaitState> wait_states = query_wait_states(call);
      if (auto late = find_late(wait_states, awaited); !late.empty()) {
        awaited = std::move(late);
      } else if (is_pair_) {
        cycle = internal::chain_of(call, rank(), call.root, [&wait_states](int r) {
          const auto found = wait_states.find(r);
          if (found == wait_states.end()) return r;
          const auto awaited_by = found->second.awaited.get();
          return awaited_by.empty() ? r : awaited_by.front();
        });
      }
      if (transport_.test()) {
        if (shows_awaited) control_->set_awaited({});
        return true;
      }
      if (const auto departure = departure_among(awaited)) fail(*departure, call);
    }
    if (cycle) fail_late({call.root}, call, cycle->text, cycle->late);
    fail_late(awaited, call, {}, awaited);
  }
}

bool MessageChannel::is_impossible(StatusQuery& query) {
  const auto now = Clock::now();
  if (now < query.time) return false;
  if (query.is_answered) return true;
  const std::uint64_t own = control_->wait_state().number;
  if (!query.is_asked) {
    query.is_asked = true;
    control_->ask(own + 1, query.peer);
    return false;
  }
  const auto answers = control_->answers();
  const auto answer = answers.find(query.peer);
  // A peer that waits in a collective that this rank has not begun waits for this rank.
  if (answer == answers.end() || answer->second.number <= own || answer->second.awaited.n == 0) {
    return false;
  }
  query.header = answer->second.header;
  query.is_answered = true;
  query.time = now + base::patience::kTransit;  // its message may have been sent before
  return false;
}

std::map<int, WaitState> MessageChannel::query_wait_states(const Call& call) {
  const WaitState own = control_->wait_state();
  control_->ask(own.number);
  const auto n = static_cast<std::size_t>(size());
  std::map<int, WaitState> wait_states;
  for (const auto end = Clock::now() + base::patience::kStatusReply;
       Clock::now() < end && wait_states.size() + 1 < n;
       std::this_thread::sleep_for(std::chrono::microseconds(100))) {
    poll_control();
    throw_if_failed(call);
    wait_states = control_->answers();
  }
  wait_states.insert_or_assign(rank(), own);
  return wait_states;
}

std::vector<int> MessageChannel::find_late(const std::map<int, WaitState>& wait_states,
                                           std::vector<int> awaited) const {
  // Ranks that wait elsewhere in the same call, or in an earlier one, wait for late ranks too.
  const std::uint64_t own = wait_states.at(rank()).number;
  for (const auto& [r, wait_state] : wait_states) {
    if (wait_state.number > own) continue;
    const auto theirs = wait_state.awaited.get();
    awaited.insert(awaited.end(), theirs.begin(), theirs.end());
  }
  std::set<int> found;
  std::vector<int> late;
  while (!awaited.empty()) {
    const int r = awaited.back();
    awaited.pop_back();
    if (!found.insert(r).second) continue;
    const auto answer = wait_states.find(r);
    // A rank that waits in a call on another channel may also reply: it waits for no rank on this
    // one. In a channel with levels it replies only if it has begun the call, or waits.
    const bool waits = answer != wait_states.end() && (has_levels_ || answer->second.awaited.n > 0);
    if (!waits) {
      late.push_back(r);
      continue;
    }
    const auto further = answer->second.awaited.get();
    awaited.insert(awaited.end(), further.begin(), further.end());
  }
  std::ranges::sort(late);
  return late;
}

}  // namespace lockstep::message
