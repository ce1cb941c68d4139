#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <lockstep/error.hpp>
#include <string>
#include <utility>

#include "base/plural.hpp"
#include "base/text.hpp"
#include "base/truncated_text.hpp"
#include "engines/shared/bootstrap/launcher_socket.hpp"
#include "run/attempt.hpp"
#include "run/describe.hpp"

// What an attempt does with --elastic: ElasticMembership decides on node 0, and every node carries
// out what concerns its places.
namespace lockstep::run {

// --- what has happened

/// What the ranks have written into their generation's segment.
void Attempt::read_progress() {
  World& world = newest();
  if (world.places.empty()) return;
  const int generation = generations_.newest();
  if (!world.has_told_step && world.job->has_completed_step()) {
    world.has_told_step = true;
    tell_rule({.kind = NodeEvent::Kind::completed_step,
               .place = world_rank(world.places.front()),
               .generation = generation});
  }
  world.has_told_finished.resize(world.places.size());
  for (std::size_t r = 0; r < world.places.size(); ++r) {
    if (world.has_told_finished[r] || !world.job->has_finished(static_cast<int>(r))) continue;
    world.has_told_finished[r] = true;
    tell_rule({.kind = NodeEvent::Kind::finished,
               .place = world_rank(world.places[r]),
               .generation = generation});
  }
}

/// Returns what the rule is told.
NodeEvent Attempt::note_end(int place, int wait_status) {
  const Place& ended = at(place);
  NodeEvent event{.kind = NodeEvent::Kind::ended, .place = world_rank(place)};
  if (ended.is_late) return event;
  const auto number = newest().number_of(place);
  const bool was_rank = number && ended.first_generation;
  const bool has_finished = was_rank && newest().job->has_finished(*number);
  const bool is_new =
      was_rank && ended.first_generation > 0 && ended.first_generation == generations_.newest();
  const std::string failure = is_new ? newest().job->failure_of(*number) : std::string();
  print_line(fmt::format("{} {} after {:.2f} s{}", name_of(place), how_ended(wait_status),
                         seconds(Clock::now() - start_),
                         has_finished       ? ", after it had done its part; the others go on"
                         : !failure.empty() ? ": " + failure
                         : was_rank         ? ""
                         : !ended.first_generation ? ", before it was a rank of a world"
                                                   : ", after it had left the world"));
  if (has_finished && outcome_.exit_code == 0) outcome_.exit_code = exit_code_of(wait_status);
  if (!was_rank || has_finished) return event;
  event.generation = generations_.newest();
  event.why = newest().job->ending_of(*number);
  event.exit_code = exit_code_of(wait_status);
  if (!context_.options.env.record_dir) return event;
  try {  // now: the segment is gone when the next generation has formed
    newest().job->write_record(*number, *context_.options.env.record_dir);
  } catch (const SystemError& error) {
    print_line(error.what());
  }
  return event;
}

void Attempt::tell_rule(const NodeEvent& event) {
  if (!elastic_) return nodes_->report(event);
  const auto reply = event.node == 0 ? elastic_->happened(event, Clock::now())
                                     : elastic_->report(event, Clock::now());
  if (reply == ElasticMembership::Reply::ignored) return;
  if (!event.why.empty()) note_loss(event.place, event.why, event.exit_code);
  if (event.kind == NodeEvent::Kind::completed_step) has_completed_step_ = true;
  if (event.kind == NodeEvent::Kind::asked && event.generation >= 0) has_regrouped_ = true;
  if (event.kind == NodeEvent::Kind::ended) {
    has_process_[static_cast<std::size_t>(event.place)] = false;
  }
  switch (reply) {
    case ElasticMembership::Reply::none:
    case ElasticMembership::Reply::ignored: return;
    case ElasticMembership::Reply::echo:
      return tell(event.node, {.kind = NodeCommand::Kind::echo, .sent = event.sent});
    case ElasticMembership::Reply::refuse:
      return tell(event.node, {.kind = NodeCommand::Kind::refuse, .place = event.place});
  }
}

/// If it is a rank of the newest generation, also if its node has not heard of that yet.
void Attempt::note_loss(int place, std::string_view why, int exit_code) {
  const auto found = std::ranges::find(members_, place);
  if (found == members_.end()) return;
  shared::Lost lost{.rank = static_cast<std::int32_t>(found - members_.begin()),
                    .generation = static_cast<std::uint32_t>(generations_.newest()),
                    .why = {}};
  const bool is_noted = std::ranges::any_of(losses_, [&](const shared::Lost& other) {
    return other.rank == lost.rank && other.generation == lost.generation;
  });
  if (is_noted) return;
  if (!first_loss_) first_loss_ = exit_code;
  base::copy_truncated(lost.why, why);
  losses_.push_back(lost);
}

void Attempt::note_lost_node(int node) {
  const std::string name = nodes_->name_of(node);
  print_line(fmt::format("{} is lost: its launcher was not heard for {:g} s", name,
                         seconds(NodeLease::at_node_0(context_.options.elastic.lease))));
  for (int place = 0; place < placement_.world_size; ++place) {
    if (elastic_->node_of(place) != node) continue;
    has_process_[static_cast<std::size_t>(place)] = false;
    note_loss(place, "was lost with " + name, /*exit_code=*/1);
  }
  nodes_->drop(node);
}

// --- what is decided, on node 0

/// What the other nodes have said.
void Attempt::hear_nodes() {
  if (elastic_) {
    for (const NodeEvent& event : nodes_->take_events()) {
      tell_rule(event);
      decide();  // each event has its consequences before the next
    }
    return;
  }
  for (const NodeCommand& command : nodes_->take_commands()) {
    if (nodes_->is_cut_off()) break;  // what it says may be old
    if (phase_ == Phase::running) carry_out(command);
  }
  if (phase_ == Phase::running && nodes_->is_cut_off()) leave_job();
}

void Attempt::admit_nodes() {
  for (const int node : nodes_->joining()) {
    const int incarnation = elastic_->join(node, Clock::now());
    if (incarnation == 0) continue;  // the lease of the one before has not run out
    nodes_->welcome(node, incarnation);
    print_line(fmt::format("{} is back", nodes_->name_of(node)));
    tell(node, {.kind = NodeCommand::Kind::waiting, .number = n_waiting_});
  }
}

/// Does what follows from what has happened.
void Attempt::regroup() {
  if (!is_elastic() || phase_ != Phase::running) return;
  if (nodes_ != nullptr && nodes_->over()) return;
  read_progress();
  if (nodes_ != nullptr) hear_nodes();
  if (elastic_) decide();
  if (phase_ == Phase::running && Clock::now() >= wakes_again_) wake_sleepers();
}

void Attempt::wake_sleepers() {
  newest().job->wake_sleepers();
  wake_delay_ *= 2;
  constexpr milliseconds kLastWake{16};
  wakes_again_ = wake_delay_ > kLastWake ? Clock::time_point::max() : Clock::now() + wake_delay_;
}

void Attempt::decide() {
  // What is carried out here may have consequences: a process that cannot be started has ended.
  for (bool is_settled = false; !is_settled && phase_ == Phase::running;) {
    if (nodes_ != nullptr) admit_nodes();
    const ElasticMembership::Actions actions = elastic_->advance(Clock::now());
    for (const int node : actions.lost) note_lost_node(node);
    for (const int place : actions.abandoned) {
      print_line(fmt::format(
          "rank {} is not replaced any more: {} processes in a row ended before they had completed "
          "a step",
          place, ElasticMembership::kFailedStarts));
    }
    for (const int place : actions.late) {
      print_line(fmt::format(
          "{} has not called regroup(), and a replacement waits for it",
          is_here(place) ? name_of(place - placement_.first_rank) : fmt::format("rank {}", place)));
    }
    for (const auto& [place, why] : actions.kill) {
      tell(elastic_->node_of(place),
           {.kind = NodeCommand::Kind::kill, .place = place, .text = why});
    }
    if (actions.ends_generation) {
      NodeCommand end{.kind = NodeCommand::Kind::end, .generation = generations_.newest()};
      for (const shared::Lost& lost : losses_) {
        if (static_cast<int>(lost.generation) != end.generation) continue;
        fmt::format_to(std::back_inserter(end.text), "{}rank {} {}", end.text.empty() ? "" : "; ",
                       lost.rank, base::text_in(lost.why));
      }
      if (end.text.empty()) end.text = "a rank asked for the next one";
      tell_all(end);
    }
    for (const int place : actions.start) {
      first_generation_of_[static_cast<std::size_t>(place)].reset();
      has_process_[static_cast<std::size_t>(place)] = true;
      tell(elastic_->node_of(place), {.kind = NodeCommand::Kind::start, .place = place});
    }
    // A world of one node forms at once.
    const std::vector<int>& chosen =
        actions.choose.empty() && placement_.n_nodes == 1 ? actions.form : actions.choose;
    if (!chosen.empty()) tell_all(choose(chosen));
    if (!actions.form.empty()) {
      tell_all({.kind = NodeCommand::Kind::form, .generation = elastic_->generation()});
    }
    if (phase_ != Phase::running) return;
    if (!actions.give_up.empty()) return give_up(actions.give_up);
    if (n_waiting_ != elastic_->n_waiting() || !chosen.empty()) {
      tell_all({.kind = NodeCommand::Kind::waiting, .number = elastic_->n_waiting()});
    }
    is_settled =
        actions.start.empty() && chosen.empty() && actions.kill.empty() && actions.lost.empty();
  }
}

NodeCommand Attempt::choose(const std::vector<int>& places) {
  // Ranks that fail to join a generation ask again from their last one.
  constexpr int kGenerationsOfLosses = 16;
  constexpr std::size_t kMostLosses = 512;  // that a rank is told of
  const int generation = elastic_->generation();
  std::erase_if(losses_, [&](const shared::Lost& lost) {
    return static_cast<int>(lost.generation) < generation - kGenerationsOfLosses;
  });
  if (losses_.size() > kMostLosses) losses_.erase(losses_.begin(), losses_.end() - kMostLosses);
  first_loss_.reset();
  members_ = places;
  NodeCommand command{.kind = NodeCommand::Kind::choose,
                      .generation = generation,
                      .lost = losses_,
                      .has_earlier_steps = has_completed_step_};
  for (const int place : places) {
    auto& first = first_generation_of_[static_cast<std::size_t>(place)];
    if (!first) first = generation;
    command.ranks.push_back({.place = place, .first_generation = *first});
  }
  return command;
}

void Attempt::tell(int node, const NodeCommand& command) {
  if (node == placement_.node_rank) return carry_out(command);
  nodes_->send(node, command);
}

void Attempt::tell_all(const NodeCommand& command) {
  for (int node = placement_.n_nodes - 1; node >= 0; --node) tell(node, command);
}

/// On node 0; another node's reason ends the job on all.
void Attempt::give_up(const std::string& why) {
  failed_ = true;
  outcome_.exit_code = first_loss_.value_or(1);
  phase_ = Phase::notified;
  phase_deadline_ = Clock::now() + kNotice;
  print_line(why + "; ending the job");
  if (elastic_ && !has_regrouped_) {
    print_line(
        "no rank had gone on by regroup() or run_elastic() before; a program that calls neither "
        "ends with its first lost rank");
  }
  why_it_ends_ = why;
  refuse_all();
  if (nodes_ != nullptr) {
    nodes_->report_failed({.exit_code = outcome_.exit_code, .interrupted = false, .text = why});
  }
}

/// Answers the ranks that wait for the next generation: there is none.
void Attempt::refuse_all() {
  for (Place& place : places_) {
    if (!place.request || !place.request->is_pending) continue;
    shared::refuse(place.socket.get(), place.request->number, /*error_number=*/0, why_it_ends_);
    place.request->is_pending = false;
  }
}

// --- what each node does

void Attempt::carry_out(const NodeCommand& command) {
  using Kind = NodeCommand::Kind;
  const int place = command.place - placement_.first_rank;
  const bool is_of_place =
      command.kind == Kind::start || command.kind == Kind::kill || command.kind == Kind::refuse;
  if (is_of_place && !is_here(command.place)) return;
  switch (command.kind) {
    case Kind::echo: return;
    case Kind::start: return replace(place);
    case Kind::kill: return kill_late(place, command.text);
    case Kind::refuse: {
      std::optional<Request>& request = at(place).request;
      if (!request || !std::exchange(request->is_pending, false)) return;
      return shared::refuse(at(place).socket.get(), request->number, 0,
                            "this rank left its world, and the others went on without it");
    }
    case Kind::end:
      read_progress();
      newest().job->end_generation(command.text);
      refuse_addresses(command.text, /*rank=*/-1);
      wake_delay_ = milliseconds(1);
      wakes_again_ = Clock::now() + wake_delay_;
      return;
    case Kind::choose: return enter(command);
    case Kind::form: formed_ = command.generation; return;
    case Kind::waiting:
      n_waiting_ = command.number;
      newest().job->set_waiting(n_waiting_);
      return;
  }
}

void Attempt::replace(int place) {
  Place& former = at(place);
  if (former.state != State::reaped) reap(former);
  const Options& options = context_.options;
  bool has_started = false;
  try {
    RankLogs log;
    if (options.log_dir) {
      log = append_to_rank_logs(*options.log_dir, world_rank(place), n_restarts_);
    }
    ProcessStarter starter(context_.guard, context_.signals);
    start_rank(place, std::move(log), /*is_replacement=*/true, starter);
    former.first_generation = std::nullopt;
    former.newest_generation = -1;
    has_started = true;
    starter.wait();
    print_line(fmt::format("started {} again", name_of(place)));
  } catch (const Error& error) {
    print_line(fmt::format("rank {} is not started again: {}", world_rank(place), error.text()));
    // A process that was started and cannot run the program ends by itself.
    if (!has_started) {
      tell_rule({.kind = NodeEvent::Kind::ended, .place = world_rank(place)});
    }
  }
}

void Attempt::kill_late(int place, const std::string& why) {
  Place& late = at(place);
  NodeEvent event{.kind = NodeEvent::Kind::killed, .place = world_rank(place)};
  const auto number = newest().number_of(place);
  if (late.first_generation && number && newest().job->has_left(*number)) {
    event.kind = NodeEvent::Kind::ended;
    event.is_done = true;  // destroy_dist: it does something else
    return tell_rule(event);
  }
  late.is_late = true;
  if (!why.empty()) print_line(fmt::format("{} {}: killing it (SIGKILL)", name_of(place), why));
  late.process.signal(SIGKILL);
  if (late.first_generation) {
    event.generation = generations_.newest();
    event.why = why;
    event.exit_code = 128 + SIGKILL;
  }
  tell_rule(event);
}

/// Makes this node's memory of the generation that was chosen, and answers its ranks.
void Attempt::enter(const NodeCommand& command) try {
  const int n_ranks = static_cast<int>(command.ranks.size());
  World next;
  hosts_.clear();
  for (int rank = 0, last = -1; rank < n_ranks; ++rank) {
    const int place = command.ranks[static_cast<std::size_t>(rank)].place;
    const int node = placement_.node_of(place);
    hosts_.push_back(node == last ? hosts_.back() : rank);
    last = node;
    if (!is_here(place)) continue;
    if (next.places.empty()) next.first_rank = rank;
    next.places.push_back(place - placement_.first_rank);
  }
  const auto generation = static_cast<std::uint32_t>(command.generation);
  const int n_here = static_cast<int>(next.places.size());
  next.job =
      newest().job->next_generation(std::max(n_here, 1), generation, command.has_earlier_steps);
  if (nodes_ != nullptr) next.job->set_world(next.first_rank, n_ranks, placement_.key);
  next.job->set_waiting(n_waiting_);
  for (int place = 0; place < n_places(); ++place) generations_.enter(place, command.generation);
  addresses_ = RankAddresses(n_ranks);
  for (int number = 0; number < n_here; ++number) {
    Place& place = at(next.places[static_cast<std::size_t>(number)]);
    const int rank = next.first_rank + number;
    place.first_generation = command.ranks[static_cast<std::size_t>(rank)].first_generation;
    place.newest_generation = command.generation;
    if (!place.request || !std::exchange(place.request->is_pending, false)) continue;
    const Request& request = *place.request;
    shared::NextWorld answer{.segment = {},
                             .rank = number,
                             .size = n_here,
                             .world_rank = rank,
                             .world_size = n_ranks,
                             .generation = generation};
    std::ranges::copy_if(command.lost, std::back_inserter(answer.lost), [&](const auto& lost) {
      return request.last_generation && lost.generation >= *request.last_generation;
    });
    for (int other = 0; other < n_ranks; ++other) {
      const int first = command.ranks[static_cast<std::size_t>(other)].first_generation;
      if (!request.last_generation || first > *request.last_generation) {
        answer.joined.push_back(other);
      }
    }
    shared::answer(place.socket.get(), request.number, next.job->fd(), answer);
  }
  print_line(fmt::format("generation {}: {} rank{}", generation, n_ranks,
                         base::plural(static_cast<std::int64_t>(n_ranks))));
  worlds_.clear();
  worlds_.emplace(command.generation, std::move(next));
  wakes_again_ = Clock::time_point::max();
  // The ranks of one host do not ask for addresses.
  if (placement_.n_nodes == 1 || n_here < n_ranks) return;
  for (const int place : newest().places) {
    tell_rule({.kind = NodeEvent::Kind::gave_address,
               .place = world_rank(place),
               .generation = command.generation});
  }
} catch (const SystemError& error) {
  give_up(nodes_ == nullptr ? error.text()
                            : fmt::format("node {}: {}", placement_.node_rank, error.text()));
}

// --- the lease of a node other than node 0

void Attempt::take_lease() {
  // When the job has ended there is no other world.
  constexpr auto kNoEnd = NodeLease::Clock::time_point::max();
  const auto until = nodes_->over() ? kNoEnd : nodes_->lease_until();
  if (placement_.node_rank == 0 || until == lease_) return;
  lease_ = until;
  newest().job->set_lease(lease_);
  context_.guard.set_lease(lease_);
}

/// Its ranks are lost to the others, who may go on without them. The launcher asks to join again.
void Attempt::leave_job() {
  has_left_ = failed_ = true;
  outcome_ = {.exit_code = 1, .joins_again = true};
  print_line(
      "lost the connection to node 0: killing the ranks of this node (SIGKILL), and joining "
      "the job again");
  kill_ranks();
}

}  // namespace lockstep::run
