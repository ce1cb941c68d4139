#include "engines/hierarchical/levels.hpp"

#include <chrono>
#include <new>
#include <string>
#include <string_view>

#include "group/failure.hpp"

namespace lockstep::hierarchical {
namespace {

/// Added to the timeout of a rank that waits for other hosts, so that the ranks of a late host
/// first report which of them is late. Ranks that wait for such a rank give it the same time.
constexpr std::chrono::milliseconds kReportTime{700};
/// On an oversubscribed machine, or in a library that does not return, a rank that waits for other
/// hosts may time out late; the ranks of its host extend its deadline by this much more.
constexpr std::chrono::milliseconds kPatience = 8 * kReportTime;

}  // namespace

void Levels::refuse(const Refusal& refusal) const noexcept {
  if (!refusal.is_pair) {
    inner->refuse(refusal);
    if (between && is_leader()) between->refuse(refusal);
  } else if (is_here(refusal.peer)) {
    Refusal here = refusal;
    here.peer = topology.place_of(refusal.peer);
    inner->refuse(here);
  } else {
    outer->refuse(refusal);
  }
}

void Levels::abandon(std::string_view reason) const noexcept {
  try {
    end_with(EngineError({}, std::string(reason)));
  } catch (const std::bad_alloc&) {
    inner->abandon(reason);
    if (between) between->abandon(reason);
    outer->abandon(reason);
  }
}

/// The levels number their ranks each in its own way, so they get the error of a peer, in the
/// group's numbers.
void Levels::end_with(const Error& error) const noexcept {
  const auto end_all = [this](const Error& of_peer) {
    outer->end_with(of_peer);
    if (between) between->end_with(of_peer);
    inner->end_with(of_peer);
  };
  try {
    internal::throw_failure(internal::failure_for_peers(error, rank()), error.context());
  } catch (const Error& of_peer) {
    end_all(of_peer);
  } catch (const std::bad_alloc&) {
    end_all(error);
  }
}

void Levels::run_between(Call call) {
  call = limited(call);
  call.ranks = topology.leaders;
  call.timeout += kReportTime;
  // The other ranks of this host wait for this one, which is not the late one if a host is late.
  inner->extend_deadline(call.timeout + kPatience);
  between->run(call);
  inner->extend_deadline(kReportTime);  // the result is about to reach them
}

void Levels::run_outer(Call call) {
  call = limited(call);
  call.timeout += kReportTime;
  inner->extend_deadline(call.timeout + kPatience);
  outer->run(call);
  inner->extend_deadline(kReportTime);
}

void Levels::run_message(const Call& call) {
  inner->begin_elsewhere(call);
  outer->run(limited(call));
  inner->end_elsewhere();
}

void Levels::compare(const Call& call) {
  if (call.check == Check::off) return;
  run_within(barrier_of(call));
  if (n_hosts() > 1 && is_leader()) run_between(barrier_of(call));
}

}  // namespace lockstep::hierarchical
