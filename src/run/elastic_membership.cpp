#include "run/elastic_membership.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <utility>

namespace lockstep::run {
namespace {

using std::chrono::milliseconds;

/// Before a replacement starts, doubled after each: a program that fails at once is not restarted
/// in a tight loop.
constexpr milliseconds kFirstDelay{100}, kLongestDelay{10'000};
constexpr int kGenerationsWithoutStep = 3;

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
      if (count({State::regrouping}) == 0) limit_ = Clock::time_point::max();  // a replacement's
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
  if (is_done || ended.has_finished) {
    ended.state = State::done;
    return;
  }
  switch (ended.state) {
    case State::rank:
    case State::regrouping:
      is_over_ = true;
      (ended.is_new ? has_lost_new_ : has_lost_rank_) = true;
      break;
    case State::starting:
    case State::waiting:
    case State::late: break;
    case State::scheduled:
    case State::vacant:
    case State::abandoned:
    case State::done: return;
  }
  const bool is_abandoned = ended.is_new && ++ended.n_failed_starts >= kFailedStarts;
  ended.state = is_abandoned ? State::abandoned : State::vacant;
  if (is_abandoned) abandoned_.push_back(place);
  fill(now);
}

void ElasticMembership::completed_step() {
  if (has_completed_step_) return;
  has_completed_step_ = true;
  n_without_step_ = 0;
  for (const int rank : ranks_) {
    Place& place = places_[static_cast<std::size_t>(rank)];
    if (place.state != State::rank && place.state != State::regrouping) continue;
    place.is_new = false;
    place.n_failed_starts = 0;
    place.delay = kFirstDelay;
  }
}

void ElasticMembership::finished(int place) {
  Place& done = places_[static_cast<std::size_t>(place)];
  if (done.state != State::rank && done.state != State::regrouping) return;
  done.has_finished = has_finished_rank_ = true;
}

/// Schedules processes for vacant places, as long as there are too few.
void ElasticMembership::fill(Clock::time_point now) {
  int n =
      count({State::rank, State::regrouping, State::starting, State::waiting, State::scheduled});
  for (Place& place : places_) {
    if (n >= options_.most) return;
    if (place.state != State::vacant) continue;
    place.state = State::scheduled;
    place.due = now + place.delay;
    place.delay = std::min(2 * place.delay, kLongestDelay);
    ++n;
  }
}

/// Ranks without which the next generation cannot form yet. Where a rank that has not done its part
/// asks, the others that have are ahead of it, and do not come; where all that ask have, the
/// others will ask too.
int ElasticMembership::n_awaited() const {
  const bool is_behind = std::ranges::any_of(places_, [](const Place& place) {
    return place.state == State::regrouping && !place.has_finished;
  });
  return static_cast<int>(std::ranges::count_if(places_, [&](const Place& place) {
    return place.state == State::rank && !(place.has_finished && is_behind);
  }));
}

void ElasticMembership::kill_late(Clock::time_point now, Actions& actions) {
  const bool is_late = now >= limit_;
  // Without a rank that waits, the end of a rank that may be at work helps nobody.
  const bool has_asked = count({State::regrouping}) > 0;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    const int number = static_cast<int>(i);
    if (place.state == State::starting && now >= place.due) {
      place.state = State::late;
      const auto limit = std::chrono::duration<double>(options_.start_limit);
      actions.kill.push_back(
          {number, fmt::format("did not call init_dist within {:g} s", limit.count())});
    }
    if (place.state != State::rank || !is_late) continue;
    if (!has_asked) {
      if (!place.has_finished) actions.late.push_back(number);
    } else if (place.has_finished) {
      place.state = State::done;
    } else {
      place.state = State::late;
      (place.is_new ? has_lost_new_ : has_lost_rank_) = true;
      actions.kill.push_back({number, "did not call regroup() in time"});
    }
  }
  if (!is_late) return;
  limit_ = Clock::time_point::max();
  is_late_told_ = true;
}

ElasticMembership::Actions ElasticMembership::advance(Clock::time_point now) {
  Actions actions;
  actions.abandoned = std::exchange(abandoned_, {});
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    if (place.state != State::scheduled || place.due > now) continue;
    place.state = State::starting;
    place.due = now + options_.start_limit;
    place.is_new = true;
    place.has_finished = false;
    actions.start.push_back(static_cast<int>(i));
  }
  kill_late(now, actions);
  if (!is_over_) {
    if (count({State::rank}) > 0) return actions;
    // All have finished: there is nothing left to join.
    for (std::size_t i = 0; i < places_.size(); ++i) {
      Place& place = places_[i];
      if (place.state == State::starting || place.state == State::waiting) {
        actions.kill.push_back({static_cast<int>(i), {}});
        place.state = State::abandoned;
      }
      if (place.state == State::scheduled) place.state = State::abandoned;
    }
    return actions;
  }
  actions.ends_generation = !is_told_;
  is_told_ = true;
  if (n_waiting() > 0 && !is_late_told_) begin_limit(now);
  if (n_awaited() > 0) return actions;

  const int n_survivors = count({State::regrouping});
  if (n_survivors == 0) {
    actions.give_up = count({State::done}) > 0 ? "the other ranks have finished without it"
                                               : "no rank is left to go on from";
    return actions;
  }
  const int n_ready = n_survivors + n_waiting();
  // What ranks have completed needs no others: who is behind does the same, however few they are.
  if (n_ready < options_.least && !has_finished_rank_) {
    if (count({State::starting, State::scheduled, State::late}) == 0) {
      actions.give_up = fmt::format("{} of at least {} ranks are left", n_ready, options_.least);
    }
    return actions;
  }
  // Ended by a loss or by an error, such as of a rank that is later than the limit in every step.
  // Not by a replacement that came and went.
  const bool has_failed = has_lost_rank_ || (n_waiting() == 0 && !has_lost_new_);
  if (has_failed && !has_completed_step_ && ++n_without_step_ >= kGenerationsWithoutStep) {
    actions.give_up =
        fmt::format("{} generations in a row ended before they completed a step (step_done())",
                    n_without_step_);
    return actions;
  }
  form(actions);
  return actions;
}

void ElasticMembership::form(Actions& actions) {
  for (const int place : ranks_) {
    if (places_[static_cast<std::size_t>(place)].state == State::regrouping) {
      actions.form.push_back(place);
    }
  }
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].state == State::waiting) actions.form.push_back(static_cast<int>(i));
    if (places_[i].state == State::rank) places_[i].state = State::done;  // they are behind it
  }
  ranks_ = actions.form;
  for (const int place : ranks_) {
    places_[static_cast<std::size_t>(place)].state = State::rank;
    places_[static_cast<std::size_t>(place)].has_finished = false;
  }
  is_over_ = has_lost_rank_ = has_lost_new_ = has_finished_rank_ = has_completed_step_ = false;
  is_told_ = is_late_told_ = false;
  limit_ = Clock::time_point::max();
}

ElasticMembership::Clock::time_point ElasticMembership::wakes_at() const {
  Clock::time_point earliest = count({State::rank}) > 0 ? limit_ : Clock::time_point::max();
  for (const Place& place : places_) {
    if (place.state != State::scheduled && place.state != State::starting) continue;
    earliest = std::min(earliest, place.due);
  }
  return earliest;
}

}  // namespace lockstep::run
