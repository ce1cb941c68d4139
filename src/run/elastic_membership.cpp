#include "run/elastic_membership.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <utility>

#include "run/node_lease.hpp"

namespace lockstep::run {
namespace {

using std::chrono::milliseconds;

/// Before a replacement starts, doubled after each: a program that fails at once is not restarted
/// in a tight loop.
constexpr milliseconds kFirstDelay{100}, kLongestDelay{10'000};
constexpr int kGenerationsWithoutStep = 3;

}  // namespace

ElasticMembership::ElasticMembership(int n_places, const ElasticOptions& options)
    : ElasticMembership(std::vector<int>{n_places}, options, {}) {}

ElasticMembership::ElasticMembership(const std::vector<int>& n_places,
                                     const ElasticOptions& options, Clock::time_point now)
    : options_(options), nodes_(n_places.size()) {
  for (std::size_t node = 0; node < nodes_.size(); ++node) {
    if (node > 0) nodes_[node].until = now + NodeLease::at_node_0(options_.lease);
    for (int i = 0; i < n_places[node]; ++i) {
      ranks_.push_back(static_cast<int>(places_.size()));
      places_.push_back({.node = static_cast<int>(node), .delay = kFirstDelay});
    }
  }
}

int ElasticMembership::count(std::initializer_list<State> states) const {
  return static_cast<int>(std::ranges::count_if(places_, [&](const Place& place) {
    return std::ranges::find(states, place.state) != states.end();
  }));
}

bool ElasticMembership::is_done() const {
  return count({State::rank, State::regrouping, State::late, State::starting, State::waiting,
                State::scheduled}) == 0;
}

int ElasticMembership::n_waiting() const { return count({State::waiting}); }

bool ElasticMembership::asked(int place, milliseconds limit, Clock::time_point now) {
  Place& asking = places_[static_cast<std::size_t>(place)];
  asked_limit_ = limit;
  switch (asking.state) {
    case State::rank:
      if (count({State::regrouping}) == 0) limit_ = Clock::time_point::max();  // a replacement's
      // A rank of no generation that has formed has nothing from which others could go on.
      asking.state = asking.has_formed ? State::regrouping : State::waiting;
      is_over_ = true;
      begin_limit(now);
      return true;
    case State::starting: asking.state = State::waiting; return true;
    case State::regrouping:
    case State::waiting: return true;  // it has given up waiting, and asks again
    case State::late:
    case State::scheduled:
    case State::vacant:
    case State::unreachable:
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
    if (ended.state == State::rank && !has_formed_) is_over_ = true;
    ended.state = State::done;
    return;
  }
  vacate(place, State::vacant);
  fill(now);
}

/// Its process is lost.
void ElasticMembership::vacate(int place, State then) {
  Place& lost = places_[static_cast<std::size_t>(place)];
  if (lost.has_finished) {
    lost.state = State::done;
    return;
  }
  switch (lost.state) {
    case State::rank:
    case State::regrouping:
      is_over_ = true;
      (lost.is_new ? has_lost_new_ : has_lost_rank_) = true;
      break;
    case State::starting:
    case State::waiting:
    case State::late: break;
    case State::scheduled:
    case State::vacant:
    case State::unreachable: lost.state = then; return;
    case State::abandoned:
    case State::done: return;
  }
  const bool is_abandoned = lost.is_new && ++lost.n_failed_starts >= kFailedStarts;
  lost.state = is_abandoned ? State::abandoned : then;
  if (is_abandoned) abandoned_.push_back(place);
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

void ElasticMembership::gave_address(int place) {
  places_[static_cast<std::size_t>(place)].has_address = true;
}

int ElasticMembership::join(int node, Clock::time_point now) {
  Node& joining = nodes_[static_cast<std::size_t>(node)];
  if (joining.state == Node::State::member) return 0;
  joining = {.until = now + NodeLease::at_node_0(options_.lease),
             .incarnation = joining.incarnation + 1};
  for (Place& place : places_) {
    if (place.node == node && place.state == State::unreachable) place.state = State::vacant;
  }
  fill(now);
  return joining.incarnation;
}

ElasticMembership::Reply ElasticMembership::report(const NodeEvent& event, Clock::time_point now) {
  Node& node = nodes_[static_cast<std::size_t>(event.node)];
  if (node.state != Node::State::member || event.incarnation != node.incarnation)
    return Reply::ignored;
  if (event.number <= node.last_number) return Reply::ignored;  // repeated
  node.last_number = event.number;
  if (event.kind == NodeEvent::Kind::heartbeat) {
    node.until = now + NodeLease::at_node_0(options_.lease);
    return Reply::echo;
  }
  if (event.place < 0 || event.place >= static_cast<int>(places_.size()) ||
      node_of(event.place) != event.node) {
    return Reply::ignored;
  }
  return happened(event, now);
}

ElasticMembership::Reply ElasticMembership::happened(const NodeEvent& event,
                                                     Clock::time_point now) {
  Place& place = places_[static_cast<std::size_t>(event.place)];
  const bool is_newest = event.generation == generation_;
  switch (event.kind) {
    case NodeEvent::Kind::heartbeat: break;
    case NodeEvent::Kind::asked:
      // It gave up waiting and has asked again, before it heard that it was chosen.
      if (place.state == State::rank && !is_newest) break;
      return asked(event.place, event.limit, now) ? Reply::none : Reply::refuse;
    case NodeEvent::Kind::gave_address:
      if (is_newest) gave_address(event.place);
      break;
    case NodeEvent::Kind::ended: ended(event.place, event.is_done, now); break;
    case NodeEvent::Kind::killed: place.is_killed = true; break;
    case NodeEvent::Kind::finished:
      if (is_newest) finished(event.place);
      break;
    case NodeEvent::Kind::completed_step:
      if (is_newest) completed_step();
      break;
  }
  return Reply::none;
}

/// Whose lease has run out here is lost, and so are its processes.
void ElasticMembership::look_at_nodes(Clock::time_point now, Actions& actions) {
  for (std::size_t i = 1; i < nodes_.size(); ++i) {
    Node& node = nodes_[i];
    if (now < node.until) continue;
    if (node.state != Node::State::member) {
      node.state = Node::State::gone;
      node.until = Clock::time_point::max();
      continue;
    }
    node.state = Node::State::lost;
    node.until = now + options_.start_limit;
    actions.lost.push_back(static_cast<int>(i));
    for (std::size_t place = 0; place < places_.size(); ++place) {
      if (places_[place].node == static_cast<int>(i)) {
        vacate(static_cast<int>(place), State::unreachable);
      }
    }
    fill(now);
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
    place.due = now + place.delay;
    place.delay = std::min(2 * place.delay, kLongestDelay);
    ++n;
  }
}

/// Ranks without which the next generation cannot form yet. Where a rank that has not done its part
/// asks, the others that have are ahead of it, and do not come; where all that ask have, the
/// others will ask too. A rank that is killed on another node may run until its node has done so.
int ElasticMembership::n_awaited() const {
  const bool is_behind = std::ranges::any_of(places_, [](const Place& place) {
    return place.state == State::regrouping && !place.has_finished;
  });
  return static_cast<int>(std::ranges::count_if(places_, [&](const Place& place) {
    if (place.state == State::late) return !place.is_killed;
    return place.state == State::rank && !(place.has_finished && is_behind);
  }));
}

void ElasticMembership::kill_late(Clock::time_point now, Actions& actions) {
  const bool is_late = now >= limit_;
  const bool is_forming = !has_formed_ && !is_over_;
  // Without a rank that waits, the end of a rank that may be at work helps nobody.
  const bool is_awaited = !has_formed_ || count({State::regrouping}) > 0;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    const int number = static_cast<int>(i);
    if (place.state == State::starting && now >= place.due) {
      place.state = State::late;
      place.is_killed = true;  // it is no rank: nobody waits for it
      const auto limit = std::chrono::duration<double>(options_.start_limit);
      actions.kill.push_back(
          {number, fmt::format("did not call init_dist within {:g} s", limit.count())});
    }
    if (place.state != State::rank || !is_late || (is_forming && place.has_address)) continue;
    if (!is_awaited) {
      if (!place.has_finished) actions.late.push_back(number);
    } else if (place.has_finished) {
      place.state = State::done;
    } else {
      place.state = State::late;
      place.is_killed = place.node == 0;
      is_over_ = true;
      (place.is_new ? has_lost_new_ : has_lost_rank_) = true;
      actions.kill.push_back({number, is_forming ? "did not give its address in time"
                                                 : "did not call regroup() in time"});
    }
  }
  if (!is_late) return;
  limit_ = Clock::time_point::max();
  is_late_told_ = !is_forming;
}

ElasticMembership::Actions ElasticMembership::advance(Clock::time_point now) {
  Actions actions;
  look_at_nodes(now, actions);
  actions.abandoned = std::exchange(abandoned_, {});
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    if (place.state != State::scheduled || place.due > now) continue;
    place.state = State::starting;
    place.due = now + options_.start_limit;
    place.is_new = true;
    place.has_finished = place.has_formed = false;
    actions.start.push_back(static_cast<int>(i));
  }
  kill_late(now, actions);
  if (!is_over_) {
    const bool is_complete = std::ranges::all_of(
        ranks_, [&](int place) { return places_[static_cast<std::size_t>(place)].has_address; });
    if (!has_formed_ && is_complete) form(actions);
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
  // While a generation forms, nobody is at work.
  if ((n_waiting() > 0 && !is_late_told_) || !has_formed_) begin_limit(now);
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
    const bool may_return = std::ranges::any_of(
        nodes_, [](const Node& node) { return node.state == Node::State::lost; });
    if (count({State::starting, State::scheduled, State::late}) == 0 && !may_return) {
      actions.give_up = fmt::format("{} of at least {} ranks are left", n_ready, options_.least);
    }
    return actions;
  }
  // Ended by a loss or by an error, such as of a rank that is later than the limit in every step.
  // Not by a replacement that came and went, nor by a loss before it had formed.
  const bool has_failed =
      has_lost_rank_ ? has_formed_ : !has_lost_new_ && (n_waiting() == 0 || !has_formed_);
  if (has_failed && !has_completed_step_ && ++n_without_step_ >= kGenerationsWithoutStep) {
    actions.give_up =
        fmt::format("{} generations in a row ended before they completed a step (step_done())",
                    n_without_step_);
    return actions;
  }
  choose(now, actions);
  return actions;
}

void ElasticMembership::choose(Clock::time_point now, Actions& actions) {
  std::vector<int> chosen;
  for (const int place : ranks_) {
    if (places_[static_cast<std::size_t>(place)].state == State::regrouping) {
      chosen.push_back(place);
    }
  }
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].state == State::waiting) chosen.push_back(static_cast<int>(i));
    if (places_[i].state == State::rank) places_[i].state = State::done;  // they are behind it
  }
  // The ranks of a node are next to each other, from the node of the first survivor on.
  ranks_.clear();
  for (const int first : chosen) {
    if (std::ranges::find(ranks_, first) != ranks_.end()) continue;
    std::ranges::copy_if(chosen, std::back_inserter(ranks_),
                         [&](int place) { return node_of(place) == node_of(first); });
  }
  for (const int place : ranks_) {
    Place& rank = places_[static_cast<std::size_t>(place)];
    rank.state = State::rank;
    rank.has_finished = rank.has_address = false;
  }
  ++generation_;
  is_over_ = has_lost_rank_ = has_lost_new_ = has_finished_rank_ = has_completed_step_ = false;
  is_told_ = is_late_told_ = has_formed_ = false;
  if (nodes_.size() == 1) return form(actions);  // its launcher has all addresses
  limit_ = now + asked_limit_;
  actions.choose = ranks_;
}

void ElasticMembership::form(Actions& actions) {
  for (const int place : ranks_) places_[static_cast<std::size_t>(place)].has_formed = true;
  has_formed_ = true;
  limit_ = Clock::time_point::max();
  actions.form = ranks_;
}

ElasticMembership::Clock::time_point ElasticMembership::wakes_at() const {
  Clock::time_point earliest = count({State::rank}) > 0 ? limit_ : Clock::time_point::max();
  for (const Node& node : nodes_) earliest = std::min(earliest, node.until);
  for (const Place& place : places_) {
    if (place.state != State::scheduled && place.state != State::starting) continue;
    earliest = std::min(earliest, place.due);
  }
  return earliest;
}

}  // namespace lockstep::run
