#include "engines/shared/job.hpp"

#include <fmt/format.h>

#include "engines/shared/seat.hpp"
#include "engines/shared/world.hpp"

namespace lockstep::shared {

Job::Job(int n_ranks) : segment_(make_world(Segment::for_processes(n_ranks))) {}

Job::~Job() = default;

int Job::fd() const noexcept { return segment_->fd(); }

std::string Job::environment() const {
  return fmt::format("{}:{:016x}", segment_->fd(), segment_->header().nonce);
}

void Job::rank_ended(int rank, int wait_status) noexcept {
  segment_->rank(rank).wait_status_plus_one.store(wait_status + 1, std::memory_order_release);
}

void Job::write_records(const std::string& dir) const {
  for (int r = 0; r < segment_->n_ranks(); ++r) {
    const RankBlock& rank = segment_->rank(r);
    const int status = rank.wait_status_plus_one.load(std::memory_order_acquire);
    if (status == 0 || rank.flight.is_written.load(std::memory_order_relaxed) != 0) continue;
    comm::write_record(rank.flight, "the rank " + describe_wait_status(status - 1), dir);
  }
}

}  // namespace lockstep::shared
