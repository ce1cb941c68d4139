#include "engines/hierarchical/levels.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engines/shared/bootstrap/shared_world.hpp"
#include "group/check.hpp"
#include "group/failure.hpp"

namespace lockstep::hierarchical {
namespace {

/// Added to the timeout of a rank that waits for other hosts, so that the ranks of a late host
/// first report which of them is late. Ranks that wait for such a rank give it the same time.
constexpr std::chrono::milliseconds kReportTime{700};
/// On an oversubscribed machine, or in a library that does not return, a rank that waits for other
/// hosts may time out late; the ranks of its host extend its deadline by this much more.
constexpr std::chrono::milliseconds kPatience = 8 * kReportTime;

/// Prefixes of errors that one level has ended the others with. The text of the first two uses the
/// numbers of the ranks there; that of the last, the group's.
constexpr std::string_view kWithin = "on one host", kBetween = "between hosts",
                           kAll = "over all hosts";

bool has_prefix(std::string_view text) {
  return text.starts_with(kWithin) || text.starts_with(kBetween) || text.starts_with(kAll);
}

/// Throws the error of one level, which refers to the group's `ranks` by their numbers there.
[[noreturn]] void rethrow_renumbered(const Error& error, const Levels& levels, const Call& call,
                                     std::string_view place, const std::vector<int>& ranks) {
  internal::Failure failure = internal::failure_of(error);
  if (failure.kind == internal::Failure::Kind::usage) throw;
  std::string& text = failure.text;
  if (levels.n_hosts() > 1 && !has_prefix(text)) {
    text = fmt::format("{}, where rank{} {} of the group {} 0 to {}: {}", place,
                       ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "),
                       ranks.size() == 1 ? "is" : "are", ranks.size() - 1, text);
    for (std::int32_t& peer : failure.peers.ranks) {
      const auto at = static_cast<std::size_t>(peer);
      if (at < ranks.size()) peer = ranks[at];
    }
  }
  internal::throw_failure(failure, context_of(call, levels.rank()));
}

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
  inner->abandon(reason);
  if (between) between->abandon(reason);
  outer->abandon(reason);
}

void Levels::end_with(const Error& error) const noexcept {
  const auto end_all = [this](const Error& of_outer, const Error& of_others) {
    outer->end_with(of_outer);
    if (between) between->end_with(of_others);
    inner->end_with(of_others);
  };
  try {
    internal::Failure failure = internal::failure_of(error);
    // One that a level throws about its caller has no numbers of ranks.
    if (n_hosts() == 1 || !internal::is_about_peers(failure.kind) || has_prefix(failure.text)) {
      return end_all(error, error);
    }
    failure.text = fmt::format("{}: {}", kAll, failure.text);
    internal::throw_failure(failure, error.context());
  } catch (const Error& of_others) {
    end_all(error, of_others);
  } catch (const std::exception&) {  // no memory for the text
    end_all(error, error);
  }
}

void Levels::rethrow_from_within(const Error& error, const Call& call) const {
  rethrow_renumbered(error, *this, call, kWithin, topology.members);
}

void Levels::run_between(Call call) {
  call = limited(call);
  call.timeout += kReportTime;
  // The other ranks of this host wait for this one, which is not the late one if a host is late.
  shared::extend_deadline(*inner, call.timeout + kPatience);
  try {
    between->run(call);
  } catch (const Error& error) {
    rethrow_renumbered(error, *this, call, kBetween, topology.leaders);
  }
  shared::extend_deadline(*inner, kReportTime);  // the result is about to reach them
}

void Levels::run_outer(Call call) {
  call = limited(call);
  call.timeout += kReportTime;
  shared::extend_deadline(*inner, call.timeout + kPatience);
  outer->run(call);
  shared::extend_deadline(*inner, kReportTime);
}

void Levels::run_message(const Call& call) {
  shared::begin_elsewhere(*inner, call);
  outer->run(limited(call));
  shared::end_elsewhere(*inner);
}

void Levels::compare(const Call& call) {
  if (call.check == Check::off) return;
  run_within(barrier_of(call));
  if (n_hosts() > 1 && is_leader()) run_between(barrier_of(call));
}

}  // namespace lockstep::hierarchical
