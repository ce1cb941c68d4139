#include "engines/shared/bootstrap/shared_world.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <charconv>
#include <lockstep/error.hpp>
#include <numeric>
#include <vector>

#include "engines/shared/algorithms/shared_engine.hpp"
#include "engines/shared/bootstrap/bootstrap.hpp"

namespace lockstep::shared {

std::shared_ptr<Segment> make_world(std::shared_ptr<Segment> segment,
                                    const std::optional<std::string>& tune) {
  segment->header().tuning = parse_tuning(tune);
  std::vector<int> all_ranks(static_cast<std::size_t>(segment->n_ranks()));
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  segment->header().world_channel = Channel::make(*segment, all_ranks);
  return segment;
}

std::shared_ptr<Segment> inherit_world(std::string_view variable) {
  const std::size_t colon = variable.find(':');
  const char* const end = variable.data() + variable.size();
  int fd = -1;
  std::uint64_t nonce = 0;
  bool is_valid = colon != std::string_view::npos;
  if (is_valid) {
    const char* const middle = variable.data() + colon;
    const auto number = std::from_chars(variable.data(), middle, fd);
    const auto digits = std::from_chars(middle + 1, end, nonce, 16);
    is_valid = number.ec == std::errc() && number.ptr == middle && fd >= 0 &&
               digits.ec == std::errc() && digits.ptr == end;
  }
  if (!is_valid) {
    throw UsageError(
        {.operation = "init_dist"},
        fmt::format("LOCKSTEP_SEGMENT is '{}', not FD:NONCE as `lockstep run` sets it; "
                    "unset it, or start the program with `lockstep run`",
                    variable));
  }
  auto segment = Segment::attach(base::UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)), nonce);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);  // child programs of a rank are not ranks
  return segment;
}

std::unique_ptr<Engine> join_world(std::shared_ptr<Segment> segment, int rank,
                                   const Call& barrier) {
  return SharedEngine::join(std::make_shared<Membership>(std::move(segment), rank), barrier);
}

std::unique_ptr<Engine> bootstrap_world(std::string_view job, int rank, int n_ranks,
                                        const Call& barrier,
                                        const std::optional<std::string>& tune) {
  return SharedEngine::join(bootstrap(job, rank, n_ranks, barrier, tune), barrier);
}

std::shared_ptr<internal::Recorder> recorder_of(const Engine& engine) noexcept {
  return static_cast<const SharedEngine&>(engine).recorder();
}

void extend_deadline(Engine& engine, std::chrono::nanoseconds at_most) noexcept {
  static_cast<SharedEngine&>(engine).extend_deadline(at_most);
}

void begin_elsewhere(Engine& engine, const Call& call) {
  static_cast<SharedEngine&>(engine).begin_elsewhere(call);
}

void end_elsewhere(Engine& engine) noexcept { static_cast<SharedEngine&>(engine).end_elsewhere(); }

std::shared_ptr<TaggedMessages> make_messages(Engine& engine, const Call& call) {
  return static_cast<SharedEngine&>(engine).make_messages(call);
}

void declare_failed(Segment& segment, int rank, std::string_view failure) noexcept {
  mark_ended(segment.rank(rank), failure);
}

}  // namespace lockstep::shared
