#include "run/elastic_membership.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>

namespace lockstep::run {
namespace {

using std::chrono::milliseconds;

/// Before a replacement starts, doubled after each: a program that fails at once is not restarted
/// in a tight loop.
constexpr milliseconds kFirstDelay{100}, kLongestDelay{10'000};
constexpr int kFailedStarts = 3, kGenerationsWithoutStep = 3;

}  // namespace

ElasticMembership::ElasticMembership(int n_places, const ElasticOptions& options)
    : options_(options), places_(static_cast<std::size_t>(n_places)) {
  for (int place = 0; place < n_places; ++place) {
    ranks_.push_back(place);
    places_[static_cast<std::size_t>(place)].delay = kFirstDelay;
  }
}

int ElasticMembership::count(std::initializer_list<State> states) const {
  return static_cast<int>(std::ranges::count_if(places_, [&](const Place& place) {
    return std::ranges::find(states, place.state) != states.end();
  }));
}

int ElasticMembership::n_waiting() const { return count({State::waiting}); }

bool ElasticMembership::asked(int place, milliseconds limit, Clock::time_point now) {
  Place& asking = places_[static_cast<std::size_t>(place)];
  asked_limit_ = limit;
  switch (asking.state) {
    case State::rank:
      asking.state = State::regrouping;
      is_over_ = true;
      begin_limit(now);
      return true;
    case State::starting: asking.state = State::waiting; return true;
    case State::regrouping:
    case State::waiting: return true;  // it has given up waiting, and asks again
    case State::late:
    case State::scheduled:
    case State::vacant:
    case State::abandoned:
    case State::done: return false;
  }
  return false;
}

/// Of all ranks, when the first of them, or a replacement, waits for the others.
void ElasticMembership::begin_limit(Clock::time_point now) {
  if (limit_ == Clock::time_point::max()) limit_ = now + asked_limit_;
}

void ElasticMembership::ended(int place, bool is_done, Clock::time_point now) {
  Place& ended = places_[static_cast<std::size_t>(place)];
  if (is_done) {
    ended.state = State::done;
    return;
  }
  switch (ended.state) {
    case State::rank:
    case State::regrouping:
      is_over_ = true;
      has_lost_rank_ = true;
      break;
    case State::starting:
    case State::waiting:
      if (++ended.n_failed_starts < kFailedStarts) break;
      ended.state = State::abandoned;
      return fill(now);
    case State::late: break;
    case State::scheduled:
    case State::vacant:
    case State::abandoned:
    case State::done: return;
  }
  ended.state = State::vacant;
  fill(now);
}

void ElasticMembership::completed_step() {
  if (has_completed_step_) return;
  has_completed_step_ = true;
  n_without_step_ = 0;
  for (Place& place : places_) {
    if (place.state != State::scheduled) place.delay = kFirstDelay;
  }
}

/// Schedules processes for vacant places, as long as there are too few.
void ElasticMembership::fill(Clock::time_point now) {
  int n =
      count({State::rank, State::regrouping, State::starting, State::waiting, State::scheduled});
  for (Place& place : places_) {
    if (n >= options_.most) return;
    if (place.state != State::vacant) continue;
    place.state = State::scheduled;
    place.start_at = now + place.delay;
    place.delay = std::min(2 * place.delay, kLongestDelay);
    ++n;
  }
}

ElasticMembership::Actions ElasticMembership::next(Clock::time_point now) {
  Actions actions;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    if (place.state == State::scheduled && place.start_at <= now) {
      place.state = State::starting;
      actions.start.push_back(static_cast<int>(i));
    }
    if (place.state == State::rank && now >= limit_) {
      place.state = State::late;
      has_lost_rank_ = true;
      actions.kill.push_back(static_cast<int>(i));
    }
  }
  if (!is_over_) {
    if (count({State::rank}) > 0) return actions;
    // All have finished: there is nothing left to join.
    for (std::size_t i = 0; i < places_.size(); ++i) {
      Place& place = places_[i];
      if (place.state == State::starting || place.state == State::waiting) {
        actions.kill.push_back(static_cast<int>(i));
        place.state = State::abandoned;
      }
      if (place.state == State::scheduled) place.state = State::abandoned;
    }
    return actions;
  }
  actions.ends_generation = !is_told_;
  is_told_ = true;
  if (n_waiting() > 0) begin_limit(now);
  if (count({State::rank}) > 0) return actions;

  const int n_survivors = count({State::regrouping});
  if (n_survivors == 0) {
    actions.give_up = count({State::done}) > 0 ? "the other ranks have finished without it"
                                               : "no rank is left to go on from";
    return actions;
  }
  const int n_ready = n_survivors + n_waiting();
  if (n_ready < options_.least) {
    if (count({State::starting, State::scheduled, State::late}) == 0) {
      actions.give_up = fmt::format("{} of at least {} ranks are left", n_ready, options_.least);
    }
    return actions;
  }
  // Ended by a loss or by an error, such as of a rank that is later than the limit in every step.
  const bool has_failed = has_lost_rank_ || n_waiting() == 0;
  if (has_failed && !has_completed_step_ && ++n_without_step_ >= kGenerationsWithoutStep) {
    actions.give_up =
        fmt::format("{} generations in a row ended before they completed a step (step_done())",
                    n_without_step_);
    return actions;
  }
  for (const int place : ranks_) {
    if (places_[static_cast<std::size_t>(place)].state == State::regrouping) {
      actions.form.push_back(place);
    }
  }
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].state == State::waiting) actions.form.push_back(static_cast<int>(i));
  }
  ranks_ = actions.form;
  for (const int place : ranks_) {
    places_[static_cast<std::size_t>(place)].state = State::rank;
    places_[static_cast<std::size_t>(place)].n_failed_starts = 0;
  }
  is_over_ = has_lost_rank_ = is_told_ = has_completed_step_ = false;
  limit_ = Clock::time_point::max();
  return actions;
}

ElasticMembership::Clock::time_point ElasticMembership::wakes_at() const {
  Clock::time_point earliest = count({State::rank}) > 0 ? limit_ : Clock::time_point::max();
  for (const Place& place : places_) {
    if (place.state == State::scheduled) earliest = std::min(earliest, place.start_at);
  }
  return earliest;
}

}  // namespace lockstep::run
