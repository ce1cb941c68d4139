#include "engines/shared/bootstrap/job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <system_error>
#include <vector>

#include "base/job_clock.hpp"
#include "base/text.hpp"
#include "base/truncated_text.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "engines/shared/segment/membership.hpp"

namespace lockstep::shared {

Job::Job(int n_ranks, const std::optional<std::string>& tune, bool is_elastic)
    : segment_(make_world(Segment::for_processes(n_ranks), tune)), tune_(tune), n_ranks_(n_ranks) {
  segment_->header().has_launcher = true;
  segment_->header().is_elastic = is_elastic;
  set_clock(base::job_clock_word());
  for (int r = 0; r < n_ranks && is_elastic; ++r) segment_->rank(r).flight.generation_plus_one = 1;
}

std::unique_ptr<Job> Job::next() const {
  auto job = std::make_unique<Job>(n_ranks_, tune_);
  // LOCKSTEP_SEGMENT in the ranks' environment names every world of the job.
  job->segment_->header().nonce = segment_->header().nonce;
  for (int r = 0; r < n_ranks_; ++r) {
    const RankBlock& before = segment_->rank(r);
    RankBlock& rank = job->segment_->rank(r);
    rank.flight.rank = before.flight.rank;
    rank.flight.world_size = before.flight.world_size;
    rank.flight.job = before.flight.job;
    rank.wait_status_plus_one.store(before.wait_status_plus_one.load(std::memory_order_relaxed),
                                    std::memory_order_relaxed);
    rank.ended_as.store(before.ended_as.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  job->segment_->header().n_ended.store(segment_->header().n_ended.load(std::memory_order_relaxed),
                                        std::memory_order_relaxed);
  return job;
}

std::unique_ptr<Job> Job::next_generation(int n_ranks, std::uint32_t generation,
                                          bool has_earlier_steps) const {
  auto job = std::make_unique<Job>(n_ranks, tune_, /*is_elastic=*/true);
  SegmentHeader& header = job->segment_->header();
  header.nonce = segment_->header().nonce;
  header.generation = generation;
  header.has_earlier_steps = has_earlier_steps;
  header.verdict_ms = segment_->header().verdict_ms;
  header.lease_until.store(segment_->header().lease_until.load(std::memory_order_relaxed),
                           std::memory_order_relaxed);
  for (int r = 0; r < n_ranks; ++r) {
    internal::FlightRecord& flight = job->segment_->rank(r).flight;
    flight.job = segment_->rank(0).flight.job;
    flight.generation_plus_one = header.generation + 1;
  }
  return job;
}

void Job::set_world(int first_rank, int world_size, std::uint32_t job) noexcept {
  for (int r = 0; r < n_ranks_; ++r) {
    internal::FlightRecord& flight = segment_->rank(r).flight;
    flight.rank = first_rank + r;
    flight.world_size = world_size;
    flight.job = job;
  }
}

void Job::set_time_of_verdict(std::chrono::milliseconds time) noexcept {
  segment_->header().verdict_ms = time.count();
}

void Job::set_lease(base::BootClock::time_point until) noexcept {
  segment_->header().lease_until.store(until.time_since_epoch().count(), std::memory_order_relaxed);
}

std::uint32_t Job::generation() const noexcept { return segment_->header().generation; }

void Job::end_generation(std::string_view why, int rank) noexcept {
  SegmentHeader& header = segment_->header();
  base::copy_truncated(header.ending, why);
  header.lost_rank_plus_one = rank + 1;
  header.is_over.store(true, std::memory_order_seq_cst);
  wake_sleepers();
}

bool Job::is_over() const noexcept {
  return segment_->header().is_over.load(std::memory_order_relaxed);
}

void Job::wake_sleepers() noexcept {
  for (int r = 0; r < n_ranks_; ++r) {
    for (const auto& offset : segment_->rank(r).sleeps_at) {
      const std::uint64_t at = offset.load(std::memory_order_seq_cst);
      if (at != 0) segment_->wake_at(at);
    }
  }
}

void Job::set_clock(std::int64_t word) noexcept {
  segment_->header().job_clock.store(word, std::memory_order_release);
}

void Job::set_waiting(int n) noexcept {
  segment_->header().n_waiting.store(static_cast<std::uint32_t>(n), std::memory_order_relaxed);
}

bool Job::has_completed_step() const noexcept {
  return segment_->header().n_steps.load(std::memory_order_relaxed) > 0;
}

std::string Job::failure_of(int rank) const {
  const RankBlock& block = segment_->rank(rank);
  const bool has_failed = block.state.load(std::memory_order_acquire) == RankState::failed;
  return has_failed ? std::string(base::text_in(block.failure)) : std::string();
}

std::string Job::ending_of(int rank) const {
  const RankBlock& block = segment_->rank(rank);
  std::string text = failure_of(rank);
  if (!text.empty()) text.insert(0, "failed: ");
  const int status = block.wait_status_plus_one.load(std::memory_order_acquire);
  if (status != 0) text += (text.empty() ? "" : ", and ") + describe_wait_status(status - 1);
  return text;
}

Job::~Job() = default;

int Job::fd() const noexcept { return segment_->fd(); }

std::string Job::environment() const {
  return fmt::format("{}:{:016x}", segment_->fd(), segment_->header().nonce);
}

void Job::rank_ended(int rank, int wait_status) noexcept {
  note_ended(segment_->header(), segment_->rank(rank), /*is_found=*/false);
  segment_->rank(rank).wait_status_plus_one.store(wait_status + 1, std::memory_order_release);
}

std::optional<pid_t> Job::process_of(int rank) const noexcept {
  const RankBlock& block = segment_->rank(rank);
  const pid_t pid = block.pid.load(std::memory_order_relaxed);
  if (pid <= 0 || !is_pid_of(base::namespace_of("pid"), block).value_or(false)) return std::nullopt;
  const auto state = base::process_state(pid, block.start_time.load(std::memory_order_relaxed));
  return state == base::ProcessState::gone ? std::nullopt : std::optional(pid);
}

bool Job::has_joined_rank() const noexcept {
  for (int r = 0; r < n_ranks_; ++r) {
    if (segment_->rank(r).pid.load(std::memory_order_relaxed) != 0) return true;
  }
  return has_joined_other_engine();
}

bool Job::has_joined_other_engine() const noexcept {
  return segment_->header().has_joined_other_engine.load(std::memory_order_relaxed);
}

bool Job::has_left(int rank) const noexcept {
  return segment_->rank(rank).state.load(std::memory_order_acquire) == RankState::left;
}

bool Job::has_finished(int rank) const noexcept {
  return segment_->rank(rank).has_finished.load(std::memory_order_relaxed);
}

bool Job::has_rank_left() const noexcept {
  for (int r = 0; r < n_ranks_; ++r) {
    const RankState state = segment_->rank(r).state.load(std::memory_order_acquire);
    if (state == RankState::left || state == RankState::failed) return true;
  }
  return false;
}

std::optional<int> Job::rank_that_left_before(int failed_rank) const {
  using State = internal::Operation::State;
  const auto has_failed = [](const std::vector<internal::Operation>& operations) {
    return std::ranges::any_of(operations, [](auto& o) { return o.state == State::failed; });
  };
  const auto last_calls = internal::operations_of(segment_->rank(failed_rank).flight);
  const auto call = std::ranges::find_if(last_calls.rbegin(), last_calls.rend(),
                                         [](auto& o) { return o.state == State::failed; });
  // Another thread may be in a call when the exception of the first call ends the process.
  const bool has_waited = call != last_calls.rend() && call->has_peer_ended &&
                          last_calls.back().state != State::finished;
  if (!has_waited) return std::nullopt;
  const auto& failed = segment_->rank(failed_rank).flight;
  const std::string group(internal::name_of(failed.groups[call->group]));
  const auto is_member = [&](const internal::FlightRecord& record) {
    const std::size_t n_groups = internal::n_groups_of(record);
    for (std::size_t g = 0; g < n_groups; ++g) {
      if (internal::name_of(record.groups[g]) == group) return true;
    }
    return false;
  };
  for (int r = 0; r < n_ranks_; ++r) {
    const RankBlock& rank = segment_->rank(r);
    const RankState state = rank.state.load(std::memory_order_acquire);
    const bool has_left = state == RankState::left || state == RankState::failed ||
                          rank.wait_status_plus_one.load(std::memory_order_acquire) != 0;
    if (r == failed_rank || !has_left || !is_member(rank.flight)) continue;
    if (!has_failed(internal::operations_of(rank.flight))) return r;
  }
  return std::nullopt;
}

void Job::write_record(int rank, const std::string& dir) const {
  const RankBlock& block = segment_->rank(rank);
  const int status = block.wait_status_plus_one.load(std::memory_order_acquire);
  if (status == 0 || block.flight.is_written.load(std::memory_order_relaxed) != 0) return;
  // A rank that recorded in memory of its own, as torch.distributed's backend does, has written it.
  std::error_code ignored;
  const bool is_empty = internal::n_groups_of(block.flight) <= 1;
  if (is_empty && std::filesystem::exists(internal::record_file(block.flight, dir), ignored))
    return;
  internal::write_record(block.flight, "the rank " + describe_wait_status(status - 1), dir);
}

void record_joined(std::string_view variable, int local_rank) noexcept try {
  const auto segment = inherit_world(variable);
  segment->header().has_joined_other_engine.store(true, std::memory_order_relaxed);
  if (local_rank >= 0 && local_rank < segment->n_ranks()) take_rank(segment->rank(local_rank));
} catch (const std::exception&) {  // another library's segment: launcher is not notified
}

}  // namespace lockstep::shared
