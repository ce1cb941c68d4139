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

// What an attempt does with --elastic: it carries out what ElasticMembership decides.
namespace lockstep::run {

/// What the ranks have written into their generation's segment.
void Attempt::read_progress() {
  const World& world = newest();
  if (world.job->has_completed_step()) elastic_->completed_step();
  for (std::size_t r = 0; r < world.places.size(); ++r) {
    if (world.job->has_finished(static_cast<int>(r))) elastic_->finished(world.places[r]);
  }
}

void Attempt::note_loss(int place, std::string_view why, int exit_code) {
  if (!first_loss_) first_loss_ = exit_code;
  shared::Lost lost{.rank = newest().rank_of(place).value_or(-1),
                    .generation = newest().job->generation(),
                    .why = {}};
  base::copy_truncated(lost.why, why);
  losses_.push_back(lost);
}

/// Does what follows from what has happened.
void Attempt::regroup() {
  if (!elastic_ || phase_ != Phase::running) return;
  read_progress();
  const ElasticMembership::Actions actions = elastic_->advance(Clock::now());
  for (const int place : actions.abandoned) {
    print_line(fmt::format(
        "rank {} is not replaced any more: {} processes in a row ended before they had completed a "
        "step",
        world_rank(place), ElasticMembership::kFailedStarts));
  }
  for (const int place : actions.late) {
    print_line(
        fmt::format("{} has not called regroup(), and a replacement waits for it", name_of(place)));
  }
  for (const auto& [place, why] : actions.kill) {
    Place& late = at(place);
    const auto number = newest().rank_of(place);
    if (late.first_generation && number && newest().job->has_left(*number)) {
      elastic_->ended(place, /*is_done=*/true,
                      Clock::now());  // destroy_dist: it does something else
      continue;
    }
    late.is_late = true;
    if (!why.empty()) print_line(fmt::format("{} {}: killing it (SIGKILL)", name_of(place), why));
    if (late.first_generation) note_loss(place, why, 128 + SIGKILL);
    late.process.signal(SIGKILL);
  }
  if (actions.ends_generation) {
    std::string why;
    for (const shared::Lost& lost : losses_) {
      if (lost.generation != newest().job->generation()) continue;
      fmt::format_to(std::back_inserter(why), "{}rank {} {}", why.empty() ? "" : "; ", lost.rank,
                     base::text_in(lost.why));
    }
    newest().job->end_generation(why.empty() ? "a rank asked for the next one" : why);
    wake_delay_ = milliseconds(1);
    wakes_again_ = Clock::now() + wake_delay_;
  }
  if (Clock::now() >= wakes_again_) {
    newest().job->wake_sleepers();
    wake_delay_ *= 2;
    constexpr milliseconds kLastWake{16};
    wakes_again_ = wake_delay_ > kLastWake ? Clock::time_point::max() : Clock::now() + wake_delay_;
  }
  bool have_started = true;
  for (const int place : actions.start) have_started = replace(place) && have_started;
  if (!actions.form.empty()) {
    try {
      form(actions.form);
    } catch (const SystemError& error) {
      return give_up(error.text());
    }
  }
  if (!actions.give_up.empty()) return give_up(actions.give_up);
  newest().job->set_waiting(elastic_->n_waiting());
  if (!have_started) regroup();  // what follows from that
}

/// Returns whether the place has a process now.
bool Attempt::replace(int place) {
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
    has_started = true;
    starter.wait();
    print_line(fmt::format("started {} again", name_of(place)));
  } catch (const Error& error) {
    print_line(fmt::format("rank {} is not started again: {}", world_rank(place), error.text()));
    // A process that was started and cannot run the program ends by itself.
    if (!has_started) elastic_->ended(place, /*is_done=*/false, Clock::now());
  }
  return has_started;
}

void Attempt::form(const std::vector<int>& places) {
  const int generation = generations_.newest() + 1;
  const std::uint32_t last = newest().job->generation();
  World next{.job = newest().job->next_generation(static_cast<int>(places.size())),
             .places = places};
  for (int place = 0; place < context_.options.n_ranks; ++place) {
    generations_.enter(place, generation);
  }
  for (const int place : places) {
    std::optional<int>& first = at(place).first_generation;
    if (!first) first = generation;
  }
  for (std::size_t r = 0; r < places.size(); ++r) {
    const Place& place = at(places[r]);
    Request& request = *at(places[r]).request;
    shared::NextWorld answer{.segment = {},
                             .rank = static_cast<int>(r),
                             .size = static_cast<int>(places.size()),
                             .generation = last + 1};
    for (const shared::Lost& lost : losses_) {
      if (request.last_generation && lost.generation >= *request.last_generation) {
        answer.lost.push_back(lost);
      }
    }
    for (std::size_t other = 0; other < places.size(); ++other) {
      const bool is_new =
          !request.last_generation || at(places[other]).first_generation > request.last_generation;
      if (is_new) answer.joined.push_back(static_cast<int>(other));
    }
    shared::answer(place.socket.get(), request.number, next.job->fd(), answer);
    request.is_pending = false;
  }
  const auto n_ranks = static_cast<std::int64_t>(places.size());
  print_line(fmt::format("generation {}: {} rank{}", last + 1, n_ranks, base::plural(n_ranks)));
  worlds_.clear();
  worlds_.emplace(generation, std::move(next));
  // Ranks that fail to join this one ask again from their last generation.
  std::int64_t oldest = generation;
  for (const int place : places) {
    oldest = std::min(oldest, at(place).request->last_generation.value_or(oldest));
  }
  std::erase_if(losses_, [&](const shared::Lost& lost) { return lost.generation < oldest; });
  first_loss_.reset();
  wakes_again_ = Clock::time_point::max();
}

void Attempt::give_up(const std::string& why) {
  failed_ = true;
  outcome_.exit_code = first_loss_.value_or(1);
  phase_ = Phase::notified;
  phase_deadline_ = Clock::now() + kNotice;
  print_line(why + "; ending the job");
  refuse_all(why);
}

/// Answers the ranks that wait for the next generation: there is none.
void Attempt::refuse_all(std::string_view why) {
  for (Place& place : places_) {
    if (!place.request || !place.request->is_pending) continue;
    shared::refuse(place.socket.get(), place.request->number, /*error_number=*/0, why);
    place.request->is_pending = false;
  }
}

}  // namespace lockstep::run
