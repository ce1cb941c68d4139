#include "engines/shared/bootstrap/shared_world.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <exception>
#include <lockstep/error.hpp>
#include <numeric>
#include <vector>

#include "base/exception.hpp"
#include "base/number.hpp"
#include "base/text.hpp"
#include "engines/shared/algorithms/shared_engine.hpp"
#include "engines/shared/bootstrap/bootstrap.hpp"
#include "engines/shared/bootstrap/launcher_socket.hpp"

namespace lockstep::shared {

std::shared_ptr<Segment> make_world(std::shared_ptr<Segment> segment,
                                    const std::optional<std::string>& tune) {
  segment->header().tuning = parse_tuning(tune);
  std::vector<int> all_ranks(static_cast<std::size_t>(segment->n_ranks()));
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  segment->header().world_channel = Channel::make(*segment, all_ranks);
  return segment;
}

namespace {

/// LOCKSTEP_SEGMENT: FD:NONCE, or FD:NONCE:FD with the socket to the launcher, or FD:NONCE:FD:next
/// of a replacement, which is in no world yet.
struct Inherited {
  int segment = -1;
  std::uint64_t nonce = 0;
  int launcher = -1;
  bool is_replacement = false;
};

template <class Number>
bool read_field(std::string_view field, Number& number, int base) {
  const auto parsed = base::parse_number<Number>(field, base);
  number = parsed.value_or(0);
  return parsed && number >= 0;
}

Inherited parse_inherited(std::string_view variable) {
  constexpr std::string_view kReplacement = ":next";
  const std::string_view given = variable;
  Inherited inherited{.is_replacement = variable.ends_with(kReplacement)};
  if (inherited.is_replacement) variable.remove_suffix(kReplacement.size());
  const std::size_t first = variable.find(':');
  const std::size_t second = first == variable.npos ? first : variable.find(':', first + 1);
  const bool is_valid =
      first != variable.npos && read_field(variable.substr(0, first), inherited.segment, 10) &&
      read_field(variable.substr(first + 1, second - first - 1), inherited.nonce, 16) &&
      (second == variable.npos || read_field(variable.substr(second + 1), inherited.launcher, 10));
  if (is_valid) return inherited;
  throw UsageError(
      {.operation = "init_dist"},
      fmt::format(
          "LOCKSTEP_SEGMENT is '{}', not FD:NONCE or FD:NONCE:FD as `lockstep run` sets it; "
          "unset it, or start the program with `lockstep run`",
          given));
}

}  // namespace

std::shared_ptr<Segment> inherit_world(std::string_view variable) {
  const Inherited inherited = parse_inherited(variable);
  auto segment = Segment::attach(base::UniqueFd(::fcntl(inherited.segment, F_DUPFD_CLOEXEC, 0)),
                                 inherited.nonce);
  // Child programs of a rank are not ranks.
  ::fcntl(inherited.segment, F_SETFD, FD_CLOEXEC);
  if (inherited.launcher >= 0) ::fcntl(inherited.launcher, F_SETFD, FD_CLOEXEC);
  return segment;
}

bool is_elastic(std::string_view variable) { return inherit_world(variable)->header().is_elastic; }

namespace {

/// As which rank this process has joined the segment's world. `rank`: what it was started as, which
/// may be another only in a later generation of an elastic world.
std::optional<int> rank_of_process(const Segment& segment, int rank) {
  // Ranks in PID namespaces of their own may all have the same pid.
  const std::uint64_t here = base::namespace_of("pid");
  for (int r = 0; r < segment.n_ranks(); ++r) {
    if (!segment.header().is_elastic && r != rank) continue;
    const RankBlock& block = segment.rank(r);
    if (block.pid.load(std::memory_order_relaxed) == ::getpid() &&
        block.pid_namespace.load(std::memory_order_relaxed) == here) {
      return r;
    }
  }
  return std::nullopt;
}

/// The process that first used the inherited socket: the same number in its forks.
pid_t owner_of_socket() {
  static const pid_t owner = ::getpid();
  return owner;
}

}  // namespace

int launcher_socket(std::string_view variable) {
  return owner_of_socket() == ::getpid() ? parse_inherited(variable).launcher : -1;
}

CurrentWorld current_world(std::string_view variable, int rank, std::int64_t last_generation,
                           const Call& barrier) {
  CurrentWorld current{.segment = inherit_world(variable), .next = {}};
  const Inherited of = parse_inherited(variable);
  const Segment& inherited = *current.segment;
  const std::optional<int> former = rank_of_process(inherited, rank);
  current.next.rank = former.value_or(rank);
  current.next.size = inherited.n_ranks();
  const bool is_over = shared::is_over(inherited.header()) ||
                       (former ? has_left(inherited.rank(*former)) : of.is_replacement);
  const pid_t owner = owner_of_socket();
  if (of.launcher < 0 || !is_over) return current;
  if (owner != ::getpid()) {
    throw UsageError(context_of(barrier, rank),
                     fmt::format("this process is a fork of rank {} (pid {}), which alone can join "
                                 "another world",
                                 current.next.rank, owner));
  }
  current.next = request_next_world(of.launcher, current.next.rank, last_generation,
                                    current.segment->header().is_elastic, barrier);
  // The variable names it from now on. The number is still the former segment's: it was just
  // mapped.
  if (::dup3(current.next.segment.get(), of.segment, O_CLOEXEC) < 0) {
    throw SystemError(context_of(barrier, current.next.rank), errno,
                      "cannot keep the descriptor of another world");
  }
  current.segment = Segment::attach(std::move(current.next.segment), of.nonce);
  return current;
}

std::unique_ptr<HostEngine> join_world(const std::shared_ptr<Membership>& membership,
                                       const Call& barrier) {
  try {
    return SharedEngine::join(membership, barrier);
  } catch (...) {  // possibly on this rank only
    membership->leave(base::text_of(std::current_exception()));
    throw;
  }
}

std::unique_ptr<HostEngine> join_world(std::shared_ptr<Segment> segment, int rank,
                                       const Call& barrier) {
  return join_world(std::make_shared<Membership>(std::move(segment), rank), barrier);
}

std::unique_ptr<HostEngine> bootstrap_world(std::string_view job, int rank, int n_ranks,
                                            const Call& barrier,
                                            const std::optional<std::string>& tune,
                                            const std::function<void()>& while_waiting) {
  return join_world(bootstrap(job, rank, n_ranks, barrier, tune, while_waiting), barrier);
}

bool Elastic::is_over() const noexcept { return shared::is_over(segment_->header()); }

internal::Failure Elastic::why_over() const { return shared::why_over(segment_->header()); }

std::chrono::milliseconds Elastic::time_of_verdict() const noexcept {
  return std::chrono::milliseconds(segment_->header().verdict_ms);
}

void Elastic::check(const ErrorContext& context) const {
  if (is_over()) internal::throw_failure(why_over(), context);
}

void Elastic::check_lease(const ErrorContext& context) const {
  if (has_lease_run_out(segment_->header())) internal::throw_failure(why_over(), context);
}

std::uint32_t Elastic::generation() const noexcept { return segment_->header().generation; }

std::uint32_t Elastic::job() const noexcept { return segment_->rank(rank_).flight.job; }

bool Elastic::has_waiting_replacements() const noexcept {
  return segment_->header().n_waiting.load(std::memory_order_relaxed) > 0;
}

void Elastic::step_done() const noexcept {
  if (has_lease_run_out(segment_->header())) return;
  segment_->header().n_steps.fetch_add(1, std::memory_order_relaxed);
}

bool Elastic::has_earlier_steps() const noexcept { return segment_->header().has_earlier_steps; }

void Elastic::finish() const noexcept {
  segment_->rank(rank_).has_finished.store(true, std::memory_order_relaxed);
}

void declare_failed(Segment& segment, int rank, std::string_view failure) noexcept {
  mark_ended(segment, rank, failure);
}

}  // namespace lockstep::shared
