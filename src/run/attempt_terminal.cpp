#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <optional>

#include "base/job_clock.hpp"
#include "run/attempt.hpp"
#include "run/describe.hpp"

// Which rank reads the terminal, and what stops the whole job.
namespace lockstep::run {

bool Attempt::gets_stdin(int place) const {
  // With --nnodes the job cannot stop until it has the foreground again.
  return world_rank(place) == context_.options.stdin_rank &&
         (nodes_ == nullptr || !Foreground::rules(STDIN_FILENO) || foreground_.is_own());
}

bool Attempt::stop_job(int signal, bool whole_group) {
  foreground_.take_back();
  if (nodes_ != nullptr) {
    print_line(fmt::format("{}: not stopped, because the other nodes would take this one for lost",
                           name_of_signal(signal)));
  } else {
    set_clock(base::stop_job_clock());
    for (Place& place : places_) place.process.signal(SIGSTOP);
  }
  const bool was_stopped = nodes_ == nullptr && Signals::stop_by(signal, whole_group);
  if (nodes_ == nullptr) set_clock(base::continue_job_clock());
  for (Place& place : places_) place.process.signal(SIGCONT);
  return was_stopped;
}

void Attempt::set_clock(std::int64_t word) {
  for (auto& [generation, world] : worlds_) world.job->set_clock(word);
}

/// A rank may have stopped because it used the terminal, or by Ctrl-Z.
void Attempt::check_stop(int place) {
  const Place& stopped = at(place);
  const std::optional<int> signal = stopped.process.stop_signal();
  if (signal == SIGTSTP && foreground_.is_lent() && reader_ == place) {
    stop_job(SIGTSTP, /*whole_group=*/true);
  }
  if (signal != SIGTTIN && signal != SIGTTOU) return;
  if (reader_ != place) {
    print_line(fmt::format(
        "{} is stopped ({}): it uses the terminal, which is for {}; --stdin {} "
        "gives it to this rank",
        name_of(place), name_of_signal(*signal),
        reader_ ? fmt::format("rank {}", world_rank(*reader_)) : "no rank", world_rank(place)));
  } else if (foreground_.lend_to(stopped.process)) {
    context_.mux.pass_at_once(world_rank(place));
    stopped.process.signal(SIGCONT);
  } else if (!stop_job(SIGTTIN, /*whole_group=*/true)) {
    print_line(fmt::format("{} uses the terminal, which this job cannot get: killing it (SIGKILL)",
                           name_of(place)));
    stopped.process.signal(SIGKILL);
  }
}

}  // namespace lockstep::run
