#include "engines/shared/bootstrap/shared_world.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <exception>
#include <lockstep/error.hpp>
#include <numeric>
#include <vector>

#include "base/exception.hpp"
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

/// LOCKSTEP_SEGMENT: FD:NONCE, or FD:NONCE:FD with the socket to the launcher.
struct Inherited {
  int segment = -1;
  std::uint64_t nonce = 0;
  int launcher = -1;
};

template <class Number>
bool read_field(std::string_view field, Number& number, int base) {
  const char* const end = field.data() + field.size();
  const auto [rest, error] = std::from_chars(field.data(), end, number, base);
  return error == std::errc() && rest == end && number >= 0;
}

Inherited parse_inherited(std::string_view variable) {
  Inherited inherited;
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
          variable));
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

std::shared_ptr<Segment> next_world(std::shared_ptr<Segment> inherited, std::string_view variable,
                                    int rank, const Call& barrier) {
  const Inherited of = parse_inherited(variable);
  if (of.launcher < 0 || !has_left(inherited->rank(rank))) return inherited;
  base::UniqueFd fd = request_next_world(of.launcher, rank, barrier);
  // The variable names it from now on. The number is still the former segment's: it was just
  // mapped.
  if (::dup3(fd.get(), of.segment, O_CLOEXEC) < 0) {
    throw SystemError(context_of(barrier, rank), errno,
                      "cannot keep the descriptor of another world");
  }
  return Segment::attach(std::move(fd), of.nonce);
}

namespace {

std::unique_ptr<HostEngine> join(const std::shared_ptr<Membership>& membership,
                                 const Call& barrier) {
  try {
    return SharedEngine::join(membership, barrier);
  } catch (...) {  // possibly on this rank only
    membership->leave(base::text_of(std::current_exception()));
    throw;
  }
}

}  // namespace

std::unique_ptr<HostEngine> join_world(std::shared_ptr<Segment> segment, int rank,
                                       const Call& barrier) {
  return join(std::make_shared<Membership>(std::move(segment), rank), barrier);
}

std::unique_ptr<HostEngine> bootstrap_world(std::string_view job, int rank, int n_ranks,
                                            const Call& barrier,
                                            const std::optional<std::string>& tune) {
  return join(bootstrap(job, rank, n_ranks, barrier, tune), barrier);
}

void declare_failed(Segment& segment, int rank, std::string_view failure) noexcept {
  mark_ended(segment.rank(rank), failure);
}

}  // namespace lockstep::shared
